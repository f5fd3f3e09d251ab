"""Keyword arguments of the verbs: for a name that a verb does not take, say which one could have
been meant.

Python's users know some names from the command line.
"""

from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from typing import Any

from planner.errors import InputError, did_you_mean

# What the verbs that are imported take, by their names.
_VERBS: dict[str, "Keywords"] = {}


class Keywords:
    """The keyword arguments of a verb: its own parameters, and the fields of a record."""

    def __init__(self, verb: str, parameters: Iterable[str], record: type) -> None:
        self._verb = verb
        self._record = record
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
        """Return what the name could mean: on the command line, or for another verb."""
        for each in fields(self._record):
            if name in _flags(each)[:1]:
                return f"did you mean `{each.name}`, which the command line calls {name}? "
            if name in _flags(each):
                return f"did you mean `{each.name}`? "

        if name in _VERBS:
            return f"planner.{name} is a function of its own; "
        close = did_you_mean(name, sorted(self.names))
        others = [f"planner.{verb}" for verb, keywords in _VERBS.items() if name in keywords.names]
        if others and not close:
            return f"it is an argument of {', '.join(others)}; "
        return close


def _flags(field: Field[Any]) -> list[str]:
    """Return the names of an option's flag as Python would write them, its own first."""
    option = field.metadata.get("option")
    if option is None:
        return []
    flags = [option.flag or field.name, *option.aliases]
    return [flag.removeprefix("--").replace("-", "_") for flag in flags]
