"""Declare a verb and its flags: those of the records in `planner.options`, and what several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import planner
from planner.cli.cluster import CLUSTER, add_cluster_arguments, cluster_of
from planner.cli.output import as_flags, given, refuse, searching
from planner.options.numbers import at_least, positive
from planner.options.option import Option, flag_of, options_in
from planner.options.solving import SolveOptions, StageRules
from planner.schedule.registry import SCHEDULES

if TYPE_CHECKING:
    from planner.solver.problem.budget import Patience

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
RecordT = TypeVar("RecordT")

# What one verb writes, the next one reads.
PLAN, PROFILE = Path("plan.json"), Path("profile.json")
TIME_LIMIT = "60s"
SOLVING = 0.5  # share of the time for the plan that a question is about
UNCHUNKED = [schedule.name for schedule in SCHEDULES if not schedule.chunked]
# What `--plan` says itself.
_SOLVING = ("schedule", "microbatches", "minibatch", "cost_model", "accept_divided_loss")
_RULES = tuple(each.name for each, _ in options_in(StageRules))


def declare(
    verbs: Verbs, name: str, summary: str, description: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Return the parser of a new verb, which `run` runs; `plan --help` lists it with its summary."""
    style = argparse.RawDescriptionHelpFormatter
    parser = verbs.add_parser(name, help=summary, description=description, formatter_class=style)
    parser.set_defaults(run=run)
    return parser


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
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if option.negation else "store_true"}
    if option.choices or get_origin(kind) is Literal:
        return {"choices": option.choices or get_args(kind)}
    bounded = at_least(option.least) if option.least is not None else option.parse or kind
    keywords = {"metavar": option.metavar, "type": positive if option.positive else bounded}
    return keywords if option.const is None else keywords | {"nargs": "?", "const": option.const}


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --plan for a verb that reads a plan and nothing else."""
    parser.add_argument("--plan", type=Path, default=PLAN, metavar="FILE", help="plan to read (default: %(default)s)")


def add_profile_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Declare --profile for a verb that solves; `more`: what else it may name."""
    help = f"profile to read, from `plan profile` or a graph.txt that PipeDream published{more}; or one for each kind "
    help += "of GPU, as in a100=a.json,t4=b.json (default: %(default)s)"
    parser.add_argument("--profile", default=str(PROFILE), metavar="FILE", help=help)


def add_output_argument(
    parser: argparse.ArgumentParser, default: Path | None = None, told: str = "%(default)s", help: str = "file to write"
) -> None:
    """Declare --output for a file."""
    help = f"{help} (default: {told})"
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="FILE", help=help)


def add_folder_argument(parser: argparse.ArgumentParser, help: str, default: Path | None = None) -> None:
    """Declare --output for a folder, whose name is `place` then: nothing is tried out beforehand."""
    parser.add_argument("-o", "--output", dest="place", type=Path, default=default, metavar="DIR", help=help)


def add_simulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what a verb simulates of a plan."""
    help = "simulate N minibatches (default: enough for a steady state)"
    parser.add_argument("--minibatches", type=int, metavar="N", help=help)
    help = "under 1f1b, update after K minibatches per replica, as `plan train --accumulate K` does (default: 1)"
    parser.add_argument("--accumulate", type=at_least(1), metavar="K", help=help)


def add_question_arguments(parser: argparse.ArgumentParser, plan: bool) -> None:
    """Declare the cluster's arguments and how to solve; with `plan`, also a plan that says both."""
    add_cluster_arguments(parser)
    add_profile_argument(parser)
    if plan:
        parser.add_argument(
            "--plan",
            type=Path,
            metavar="FILE",
            help="plan made from that profile, with its own schedule, on its own cluster or on the one that the "
            "arguments describe (default: the fastest plan for the cluster that the arguments describe; "
            f"{PLAN} where they describe none)",
        )
    add_options(parser, SolveOptions, "schedule", choices=UNCHUNKED)
    add_options(parser, SolveOptions, "microbatches", "minibatch", "accept_divided_loss", "cost_model")
    add_rule_arguments(parser)


def add_rule_arguments(parser: argparse.ArgumentParser, time_limit: str = TIME_LIMIT) -> None:
    """Declare what stages may be like, and how long to search."""
    add_options(parser.add_argument_group("stages"), StageRules)
    add_options(parser, SolveOptions, "time_limit_s", default=time_limit)


@contextmanager
def patience_of(args: argparse.Namespace) -> Iterator[Patience]:
    """Start the clock of all that the verb does, by the arguments, and show on stderr how far the searches are."""
    from planner.solver.problem.budget import Patience

    with searching() as progress:
        yield Patience.of(args.time_limit_s, progress)


def plan_of(args: argparse.Namespace, profile: planner.Profile, patience: Patience) -> planner.Plan:
    """Return the plan of --plan, or the fastest for the arguments' cluster, or plan.json where neither is given.

    With --plan and a cluster, return the plan's stages as they are on that cluster.

    Raises:
        InputError: for --plan with arguments that say how to solve, or with a cluster of fewer GPUs.
    """
    from planner.analysis.given_plan import GivenPlan
    from planner.solver.find_plan import find_plan

    described = any(given(args, name) for name in CLUSTER)
    path = PLAN if args.plan is None and PLAN.exists() and not described else args.plan
    if path is None:
        return find_plan(profile, cluster_of(args, profile), read_options(SolveOptions, args), patience.part(SOLVING))
    refuse(args, "plan", *_SOLVING, *_RULES, why=", which says so itself")
    plan = planner.load_plan(path)
    return GivenPlan.of(profile, plan).on(cluster_of(args, profile)) if described else plan


def profile_path(path: Path, size: int) -> Path:
    """Return where the profile of one of several batch sizes is: profile.json becomes profile-b8.json."""
    return path.with_name(f"{path.stem}-b{size}{path.suffix}")
