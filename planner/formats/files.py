"""Read and write the JSON files: they are validated on load, and moved into place when complete."""

import dataclasses
import errno
import json
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args
from uuid import uuid4

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from planner.errors import InputError, PlannerError

_TRIED_BYTES = 4096  # more than a disk that is full has left

# by a field of theirs
_KINDS = {"stages": "plan", "layers": "profile", "levels": "cluster", "events": "timeline"}

RecordT = TypeVar("RecordT", bound="Record")


class Record(BaseModel):
    """Base of every record in a file: immutable; an unknown field is an error, because it may be a
    misspelt one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


if TYPE_CHECKING:
    # mypy checks fields and values of a pydantic model here as it does those of a dataclass
    from dataclasses import replace as replace
else:

    def replace(record, /, **changes):
        """Return a copy of a record, or of a dataclass, with other values of these fields.

        A record's validators do not run again.
        """
        if isinstance(record, BaseModel):
            return record.model_copy(update=changes)
        return dataclasses.replace(record, **changes)


class GrownRecord(Record):
    """A record that has got fields since its files were first written; these are left out where
    they have defaults.
    """

    later_fields: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        return {
            name: value
            for name, value in content.items()
            if name not in self.later_fields or getattr(self, name) != fields[name].default
        }


# of what version 0.1 wrote; it was false in plans that could never be trained
AlwaysTrue = Literal[True]


_IRREGULAR = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path | str) -> None:
    """Raise OSError for a FIFO, a socket or a device, which may have no end, or make whoever opens
    it wait for ever.

    What is not there, or is a folder, is left to whoever opens it.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        kind = _IRREGULAR.get(stat.S_IFMT(Path(path).stat().st_mode))
        if kind is not None:
            raise OSError(errno.EINVAL, f"it is {kind}, and no file")


def read_text(path: Path | str) -> str:
    """Return the text of a file in UTF-8; raise OSError as `check_regular` does, or ValueError for
    other bytes.
    """
    check_regular(path)
    return Path(path).read_text(encoding="utf-8")


def load_record(
    record: type[RecordT], path: Path | str, error: type[InputError], remedy: str
) -> RecordT:
    """Read and validate `path`; raise `error` with the file, the field, the offending value, and
    `remedy` as hint.
    """
    try:
        text = read_text(path)
        content = parse_json(text)
    except FileNotFoundError:
        raise error(f"there is no file '{path}'", hint=remedy) from None
    except OSError as cause:
        raise error(f"'{path}' cannot be read: {cause.strerror or cause}", hint=remedy) from None
    except ValueError as cause:
        raise error(f"'{path}' is not JSON: {cause}", hint=remedy) from None

    if not isinstance(content, dict):
        raise error(f"'{path}' holds a {type(content).__name__}, not an object", hint=remedy)
    # Checked before the fields: a field of another version or of another file is not a misspelt
    # one.
    version = content.get("schema_version")
    fields = record.model_fields
    if "schema_version" in fields:
        field = fields["schema_version"]
        known = get_args(field.annotation) or (field.default,)
        if version not in known:
            expected = " or ".join(map(str, known))
            raise error(
                f"'{path}' has schema_version {version!r}, this version reads {expected}",
                hint=remedy,
            )

    if other := next(
        (kind for field, kind in _KINDS.items() if field in content and field not in fields), None
    ):
        wanted = next(
            (kind for field, kind in _KINDS.items() if field in fields), "file of this kind"
        )
        raise error(f"'{path}' holds a {other}, not a {wanted}", hint=remedy)

    try:
        # Strictly: a number in quotation marks is a mistake of whoever wrote the file.
        return record.model_validate_json(text, strict=True)
    except ValidationError as cause:
        raise error(f"'{path}': {first_problem(cause)}", hint=remedy) from None


def parse_json(text: str) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: for what is no JSON, for what is nested as deeply as no file of ours, and for an
            object that has a key twice, of which readers take one or the other.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path | str) -> Any:
    """Return the content of a JSON file; raise OSError and ValueError as `read_text` and
    `parse_json` do.
    """
    return parse_json(read_text(path))


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key '{twice}' twice")
    return content


def save_record(record: Record, path: Path | str) -> None:
    write_text(path, record.model_dump_json(indent=1) + "\n")


def write_text(path: Path | str, text: str) -> None:
    """Write `text` in place of `path`, as UTF-8; raise PlannerError, with nothing left behind, when
    it cannot be.
    """
    with _writing(Path(path)), replacing(Path(path)) as temporary:
        temporary.write_bytes(text.encode())


def check_writable(path: Path | str) -> None:
    """Raise PlannerError if `path` could not be written, before the work whose result it is to
    hold.
    """
    path = Path(path)
    with _writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_regular(path)  # which would be replaced by a file
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}.") as file:
            file.write(bytes(_TRIED_BYTES))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise PlannerError(
            f"'{path}' cannot be written: {cause.strerror or cause}",
            hint="choose another place to write to",
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write to; when the block ends without an error, it is flushed and
    replaces `path`.
    """
    check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def out_of_range(error: ValueError) -> InputError | None:
    """Return a sentence for a record of an answer that cannot be, as sums of huge quantities give
    it; else None.
    """
    if not isinstance(error, ValidationError):
        return None
    return InputError(
        f"the answer has a number that cannot be, {error.title}.{first_problem(error)}",
        hint="look for a quantity of the input that is far too large or too small: a rate, a "
        "latency, a number of "
        "samples",
    )


def first_problem(cause: ValidationError) -> str:
    """Return the first problem in a sentence: the field, its value, and what is wrong with it."""
    problem = cause.errors()[0]
    place = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]
    ).lstrip(".")
    if problem["type"] == "missing":
        return f"field '{place}' is missing"
    ours = {"extra_forbidden": "unknown field", "too_short": "there has to be one at least"}
    message = ours.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    value = repr(problem["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    if not place:
        return message
    return f"{place} = {shown}: {message}"
