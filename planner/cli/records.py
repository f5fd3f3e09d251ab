"""Flags of the records in `planner.options`, and records of the flags that were given."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from planner.cli.output import as_flags
from planner.options.numbers import at_least, positive
from planner.options.option import Option, flag_of, options_in

RecordT = TypeVar("RecordT")


def add_options(
    parser: argparse._ActionsContainer, record: type, *names: str, more: str = "", told: str = "", **changes: Any
) -> None:
    """Declare the flags of these fields of a record, or of all.

    Where one field is named, `more` follows its help, `told` says its default, and `changes` are argparse's keywords.

    A flag that is not given is None, so that the record's own default holds.
    """
    for each, option in options_in(record):
        if (names and each.name not in names) or (flag := flag_of(each.name, option)) is None:
            continue
        text = as_flags(option.help).replace("%", "%%")
        stated = told or changes.get("default") or option.told or _written(each.default)
        after = f" (default: {as_flags(stated)})" if stated else ""
        keywords = {"dest": each.name, "default": None, "help": f"{text}{more}{after}"}
        parser.add_argument(flag, **_by_type(each.type, option) | keywords | changes)


def _written(default: Any) -> str:
    """Write a default for people; "" where there is none to tell of."""
    if default in (None, (), MISSING) or default is False:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def given_options(record: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a record that the user gave."""
    values = {each.name: getattr(args, each.name, None) for each, _ in options_in(record)}
    return {name: value for name, value in values.items() if value is not None}


def read_options(record: Callable[..., RecordT], args: argparse.Namespace, **others: Any) -> RecordT:
    """Return the record of what the user gave, and its defaults for the rest."""
    return record(**given_options(record, args) | others)  # type: ignore[arg-type]


def _by_type(kind: Any, option: Option) -> dict[str, Any]:
    """Return what argparse has to know of an option whose values are of this type."""
    if isinstance(kind, str) or option.repeat:  # a type that this module does not import; the texts of a list
        kind = str
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if option.negation else "store_true"}
    if option.choices or get_origin(kind) is Literal:
        return {"choices": option.choices or get_args(kind)}
    bounded = at_least(option.least) if option.least is not None else option.parse or kind
    keywords = {"metavar": option.metavar, "type": positive if option.positive else bounded}
    if option.repeat:
        return keywords | {"action": "append"}
    return keywords if option.const is None else keywords | {"nargs": "?", "const": option.const}
