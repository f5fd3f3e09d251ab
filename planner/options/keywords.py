"""Keyword arguments of the verbs: for a name that a verb does not take, say which one could have
been meant.

Python's users know some names from the command line, and some options are fields of a record that a
verb takes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_args

from planner.errors import InputError, did_you_mean

# What the verbs that are imported take, by their names.
_VERBS: dict[str, "Keywords"] = {}


class Keywords:
    """The keyword arguments of a verb: its own parameters, and the fields of a record."""

    def __init__(self, verb: str, parameters: Iterable[str], record: type) -> None:
        self._verb, self._record = verb, record
        self.names = {*parameters, *(each.name for each in fields(record))}
        _VERBS.setdefault(verb, self)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise InputError for the first name that the verb does not take."""
        unknown = next((name for name in given if name not in self.names), None)
        if unknown is not None:
            raise InputError(
                f"planner.{self._verb} takes no argument `{unknown}`",
                hint=f"{self._meant(unknown)}help(planner.{self._verb}) shows all",
            )

    def _meant(self, name: str) -> str:
        by_flag = next((field for field, flag in _flags(self._record) if flag == name), None)
        if by_flag is not None:
            return f"did you mean `{by_flag}`, which the command line calls {name}? "
        by_alias = next((field for field, alias in _aliases(self._record) if alias == name), None)
        if by_alias is not None:
            return f"did you mean `{by_alias}`? "
        for field, nested in _nested(self._record):
            for option, flag in _flags(nested):
                if name in (option, flag):
                    return f"give `{field}=planner.{nested.__name__}({option}=...)`; "
        if name in _VERBS:
            return f"planner.{name} is a function of its own; "
        others = [f"planner.{verb}" for verb, keywords in _VERBS.items() if name in keywords.names]
        close = did_you_mean(name, sorted(self.names))
        if others and not close:
            return f"it is an argument of {', '.join(others)}; "
        return close


def _flags(record: type) -> Iterator[tuple[str, str]]:
    """Yield the names of a record's options, each with that of its flag as Python would
    write it.
    """
    for each in fields(record):
        option = each.metadata.get("option")
        flag = None if option is None else option.flag
        yield each.name, (flag or each.name).removeprefix("--").replace("-", "_")


def _aliases(record: type) -> Iterator[tuple[str, str]]:
    """Yield the names of a record's options, each with another name of its flag, as Python would
    write it.
    """
    for each in fields(record):
        option = each.metadata.get("option")
        for alias in () if option is None else option.aliases:
            yield each.name, alias.removeprefix("--").replace("-", "_")


def _nested(record: type) -> Iterator[tuple[str, type]]:
    """Yield the fields of a record that are records themselves."""
    for each in fields(record):
        nested = _record_in(each)
        if nested is not None:
            yield each.name, nested


def _record_in(field: Field[Any]) -> type | None:
    parts = (field.type, *get_args(field.type))
    return next((part for part in parts if isinstance(part, type) and is_dataclass(part)), None)
