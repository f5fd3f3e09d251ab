"""Declare a verb and its flags: those of the records in `planner.options`, and what several verbs
share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union, get_args, get_origin

import planner
from planner.cli.output import as_flags, searching
from planner.cli.parser import Advanced
from planner.options.cluster import ClusterOptions
from planner.options.option import Option, choices_of, flag_of, options_in
from planner.options.solving import TIME_LIMIT_S, SolveOptions, StageRules

if TYPE_CHECKING:
    from planner.solver.clock import Clock

RecordT = TypeVar("RecordT")
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# What one verb writes, the next one reads.
PLAN = Path("plan.json")
PROFILE = Path("profile.json")


def declare(
    verbs: Verbs,
    name: str,
    summary: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Return the parser of a new verb, which `run` runs; `plan --help` lists it with its
    summary.
    """
    parser = verbs.add_parser(name, help=summary, description=description)
    parser.set_defaults(function=run)
    return parser


def add_options(
    parser: argparse._ActionsContainer,
    record: type,
    *names: str,
    more: str = "",
    told: str = "",
    **changes: Any,
) -> None:
    """Declare the flags of these fields of a record, or of all; of one field change the help, the
    default, and more.
    """
    for each, option in options_in(record):
        if (names and each.name not in names) or (flag := flag_of(each.name, option)) is None:
            continue
        text = as_flags(changes.pop("help", option.help)).replace("%", "%%")
        stated = told or option.told or _written(each.default)
        shown = f"{text}{more}"
        if stated:
            between = "\n" if "\n" in shown else " "
            shown += f"{between}(default: {as_flags(stated)})"
        keywords = {
            "dest": each.name,
            "default": None,
            "help": Advanced(shown) if option.advanced else shown,
        }
        parser.add_argument(
            flag, *option.aliases, **_by_type(each.type, option) | keywords | changes
        )


def _written(default: Any) -> str:
    if default in (None, (), MISSING) or default is False:
        return ""
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)


def _by_type(kind: Any, option: Option) -> dict[str, Any]:
    """Return what argparse has to know of an option whose values are of this type; the record
    checks their bounds.
    """
    # a type that this module does not import; the texts of a list
    if isinstance(kind, str) or option.repeat:
        kind = str
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if option.negation else "store_true"}
    if choices := option.choices or choices_of(kind):
        return {"choices": choices, "type": option.parse or str}
    keywords = {"metavar": option.metavar, "type": option.parse or kind}
    if option.repeat:
        return keywords | {"action": "append"}
    if option.const is None:
        return keywords
    return keywords | {"nargs": "?", "const": option.const}


def given_options(record: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a record that the user gave."""
    values = {each.name: getattr(args, each.name, None) for each, _ in options_in(record)}
    return {name: value for name, value in values.items() if value is not None}


def read_options(
    record: Callable[..., RecordT], args: argparse.Namespace, **others: Any
) -> RecordT:
    """Return the record of what the user gave, and its defaults for the rest."""
    return record(**given_options(record, args) | others)  # type: ignore[arg-type]


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "cluster"; `cluster_of` reads it."""
    group = parser.add_argument_group(
        "cluster",
        "--servers, --gpus-per-server and --bandwidth; or --gpus and --bandwidth; or --cluster",
    )
    add_options(group, ClusterOptions)


def cluster_of(args: argparse.Namespace, profile: planner.Profile) -> planner.Cluster:
    """Return the cluster that the arguments describe; raise ClusterError when they do not describe
    one.
    """
    return planner.cluster(profile, **given_options(ClusterOptions, args))


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --plan for a verb that reads a plan and nothing else."""
    parser.add_argument(
        "--plan",
        type=Path,
        default=PLAN,
        metavar="FILE",
        help="plan to read (default: %(default)s)",
    )


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --profile for a verb that solves."""
    help = (
        "profile to read, from `plan profile`; or one for each kind of GPU, as in "
        "a100=a.json,t4=b.json "
    )
    help += "(default: %(default)s)"
    parser.add_argument("--profile", default=str(PROFILE), metavar="FILE", help=help)


def add_output_argument(
    parser: argparse.ArgumentParser, default: Path | None = None, told: str = "%(default)s"
) -> None:
    """Declare --output for a file."""
    help = f"file to write (default: {told})"
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="FILE", help=help)


def add_folder_argument(
    parser: argparse.ArgumentParser, help: str, default: Path | None = None
) -> None:
    """Declare --output for a folder, whose name is `place` then: nothing is tried out
    beforehand.
    """
    parser.add_argument(
        "-o", "--output", dest="place", type=Path, default=default, metavar="DIR", help=help
    )


def add_rule_arguments(
    parser: argparse.ArgumentParser, record: type[StageRules] = StageRules
) -> None:
    """Declare what stages may be like, and how long to search."""
    add_options(
        parser.add_argument_group("stages"),
        record,
        *(each.name for each, _ in options_in(StageRules)),
    )
    add_options(parser, SolveOptions, "time_limit_s")


@contextmanager
def clock_of(args: argparse.Namespace) -> Iterator[Clock]:
    """Start the clock of all that the verb does, by the arguments, and show on stderr how far the
    searches are.
    """
    from planner.solver.clock import Clock

    with searching() as progress:
        yield Clock.of(TIME_LIMIT_S if args.time_limit_s is None else args.time_limit_s, progress)
