"""A trainer's file as dotted keys and values: each is understood, of no effect on time and memory,
or named.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import InputError, did_you_mean
from planner.formats.files import read_text
from planner.options.numbers import is_count

ValueT = TypeVar("ValueT")
MOST_OF_SECTION = 3  # keys that are named one by one
LEFT_OPEN = "auto"  # a value that a trainer fills in itself
# Values by which a feature is left out.
OFF: tuple[object, ...] = (None, False, "none", "no", "false", "disabled", "", (), LEFT_OPEN)


@dataclass
class Settings:
    """What a file says, and which of it was asked for.

    Attributes:
        file: its name, for messages.
        values: by dotted keys: "training.seq_len".
        understood: keys that were asked for.
    """

    file: str
    values: Mapping[str, object]
    understood: set[str] = field(default_factory=set)

    def get(self, key: str) -> object:
        """Return a value; None where there is none, or where the trainer fills it in."""
        self.understood.add(key)
        value = self.values.get(key)
        if value == LEFT_OPEN:
            return None
        return value

    def count(self, key: str, least: int = 1) -> int | None:
        """Return a whole number; raise InputError for anything else."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str) and is_count(value):  # as accelerate writes some
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"not a number of {least} or more", f"as in {key}: {least}")
        return value

    def switch(self, key: str) -> bool | None:
        """Return whether something is on; raise InputError for anything but true and false."""
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
            return value.lower() in ("true", "yes")
        raise self.wrong(key, "neither true nor false", f"give {key} one of these")

    def choice(self, key: str, choices: Mapping[str, ValueT]) -> ValueT | None:
        """Return what one of several words stands for; raise InputError for another word."""
        value = self.get(key)
        if value is None:
            return None
        word = str(value)
        if word not in choices:
            meant = did_you_mean(word, choices)
            raise self.wrong(key, "unknown", f"{meant}known are {', '.join(choices)}")
        return choices[word]

    def wrong(self, key: str, why: str, hint: str) -> InputError:
        """Return the error for a value, which says where it is."""
        value = json.dumps(self.values.get(key), default=str)
        return InputError(f"{self.file}: {key} is {value}, {why}", hint=hint)

    def left(self, neutral: Sequence[str], priced: Mapping[str, object]) -> tuple[str, ...]:
        """Return what may change time or memory and was not asked for: "compile.enable: true".

        Args:
            neutral: patterns of keys that change neither.
            priced: values that what is priced has, by keys.
        """
        left = [
            key
            for key, value in self.values.items()
            if key not in self.understood
            and not any(fnmatchcase(key, pattern) for pattern in neutral)
            and not _is_as_priced(key, value, priced)
        ]
        return tuple(dict.fromkeys(self._words(key, left) for key in left))

    def _words(self, key: str, left: Sequence[str]) -> str:
        """Write a key with its value, or its section where much of that is left."""
        section = key.rpartition(".")[0]
        count = sum(other.rpartition(".")[0] == section for other in left)
        if section and count > MOST_OF_SECTION:
            return f"{section} ({count} keys)"
        return f"{key}: {json.dumps(self.values[key], default=str)}"


def _is_as_priced(key: str, value: object, priced: Mapping[str, object]) -> bool:
    if key in priced:
        return value == priced[key] or value == LEFT_OPEN
    if isinstance(value, str):
        return value.lower() in OFF
    return value in OFF


def settings_of(file: str, content: object) -> Settings:
    """Return what a parsed file says; raise InputError where it is no object of names and
    values.
    """
    if not isinstance(content, Mapping):
        raise InputError(
            f"'{file}' holds no names with values", hint="give the file that the trainer reads"
        )
    return Settings(file, dict(_flat(content)))


def _flat(values: Mapping[Any, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif isinstance(value, list):
            yield key, tuple(value)
        else:
            yield key, value


def text_of(path: Path) -> str:
    """Return the text of a trainer's file; raise InputError where there is none."""
    try:
        return read_text(path)
    except FileNotFoundError:
        raise InputError(f"there is no file '{path}'", hint="check the path") from None
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # bytes that are no text
        raise InputError(f"'{path}' is no text: {error}") from None


def parsed(file: str, kind: str, parse: Callable[[str], object], text: str) -> Settings:
    """Return the settings of a text; raise InputError with the line where it is no such file."""
    try:
        content = parse(text)
    except ValueError as error:  # of tomllib and json
        raise InputError(f"'{file}' is not {kind}: {_in_one_line(error)}") from None
    return settings_of(file, content)


def parsed_yaml(file: str, text: str) -> Settings:
    """Return the settings of a YAML text; raise InputError where it is none, or where nothing here
    reads YAML.
    """
    try:
        import yaml
    except ImportError:
        raise InputError(
            f"'{file}' is YAML, which the package PyYAML reads", hint="pip install pyyaml"
        ) from None

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"'{file}' is not YAML: {_in_one_line(error)}") from None

    return settings_of(file, content)


def parse_toml(text: str) -> object:
    """Return what TOML says; raise InputError where nothing here reads it, ValueError for what is
    none.
    """
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)

    try:
        import tomli
    except ImportError:
        raise InputError(
            "TOML is read by Python 3.11 and later, or by the package tomli",
            hint="pip install tomli",
        ) from None

    return tomli.loads(text)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
