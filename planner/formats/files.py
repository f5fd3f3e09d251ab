"""Read and write the JSON files: they are validated on load, and moved into place when complete."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from uuid import uuid4

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from planner.errors import InputError, PlannerError

_TRIED_BYTES = 4096  # more than a disk that is full has left

_KINDS = {"stages": "plan", "layers": "profile", "levels": "cluster", "events": "timeline"}  # by a field of theirs

RecordT = TypeVar("RecordT", bound="Record")


class Record(BaseModel):
    """Base of every record in a file: immutable; an unknown field is an error, because it may be a misspelt one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GrownRecord(Record):
    """A record that has got fields since its files were first written.

    `later_fields` are left out where they have their default: a file that says no more than an older one is equal to
    it, and so is its digest.
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


def refuse_max_load(value: object) -> object:
    """Refuse what version 0.1 wrote for plans of the max-load objective, and accept all else."""
    if value is False or value == "max-load":
        raise ValueError(
            "only plans for the max-load objective had this; they could never be trained, and moved to "
            "benchmarks/dnn_partitioning"
        )
    return value


AlwaysTrue = Annotated[bool, AfterValidator(refuse_max_load)]


def load_record(record: type[RecordT], path: Path | str, error: type[InputError], remedy: str) -> RecordT:
    """Read and validate `path`.

    Args:
        error: raised with the file, the field and the offending value when anything is wrong.
        remedy: the command that makes a good file, for the hint.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        raise error(f"there is no file '{path}'", hint=remedy) from None
    except OSError as cause:
        raise error(f"'{path}' cannot be read: {cause.strerror or cause}", hint=remedy) from None
    except ValueError as cause:
        raise error(f"'{path}' is not JSON: {cause}", hint=remedy) from None
    if not isinstance(content, dict):
        raise error(f"'{path}' holds a {type(content).__name__}, not an object", hint=remedy)
    # Checked before the fields: a field of another version is not a misspelt one.
    expected = record.model_fields["schema_version"].default if "schema_version" in record.model_fields else None
    if expected is not None and content.get("schema_version") != expected:
        raise error(
            f"'{path}' has schema_version {content.get('schema_version')!r}, this version reads {expected}", hint=remedy
        )
    for field, kind in _KINDS.items():
        if field in content and field not in record.model_fields:
            wanted = [kind for field, kind in _KINDS.items() if field in record.model_fields]
            raise error(f"'{path}' holds a {kind}, not a {(wanted or ['file of this kind'])[0]}", hint=remedy)
    try:
        # Strictly: a number in quotation marks is a mistake of whoever wrote the file.
        return record.model_validate_json(text, strict=True)
    except ValidationError as cause:
        raise error(f"'{path}': {first_problem(cause)}", hint=remedy) from None


def save_record(record: Record, path: Path | str) -> None:
    """Write `record` to `path` atomically: a reader sees the old file or the new one, never half."""
    write_text(path, record.model_dump_json(indent=1) + "\n")


def write_text(path: Path | str, text: str) -> None:
    """Write `text` in place of `path`, as UTF-8; raise PlannerError, with nothing left behind, when it cannot be."""
    with _writing(Path(path)), replacing(Path(path)) as temporary:
        temporary.write_bytes(text.encode())


def check_writable(path: Path | str) -> None:
    """Raise PlannerError if `path` could not be written, before the work whose result it is to hold."""
    path = Path(path)
    with _writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}.") as file:
            file.write(bytes(_TRIED_BYTES))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise PlannerError(
            f"'{path}' cannot be written: {cause.strerror or cause}", hint="choose another place to write to"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path` to write to; when the block ends, it is flushed to disk and replaces `path`.

    Missing folders are made. If the block or the replacement fails, as when the disk is full, the old file stays as it
    was and the temporary one is removed.
    """
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


def first_problem(cause: ValidationError) -> str:
    """Return the first problem in a sentence: the field, its value, and what is wrong with it."""
    problem = cause.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    if problem["type"] == "missing":
        return f"field '{place}' is missing"
    ours = {"extra_forbidden": "unknown field", "too_short": "there has to be one at least"}
    message = ours.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    value = repr(problem["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"{place} = {shown}: {message}" if place else message
