"""Declare a verb and its flags: those of the records in `planner.options`, and what several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import planner
from planner.cli.cluster import CLUSTER, add_cluster_arguments, cluster_of
from planner.cli.output import searching
from planner.cli.records import add_options, read_options
from planner.options.option import given, options_in, refuse
from planner.options.solving import TIME_LIMIT_S, SolveOptions, StageRules
from planner.schedule.registry import SCHEDULES

if TYPE_CHECKING:
    from planner.solver.problem.budget import Patience

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# What one verb writes, the next one reads.
PLAN, PROFILE = Path("plan.json"), Path("profile.json")
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
    parser = verbs.add_parser(name, help=summary, description=description, formatter_class=style, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


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


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what stages may be like, and how long to search."""
    add_options(parser.add_argument_group("stages"), StageRules)
    add_options(parser, SolveOptions, "time_limit_s")


@contextmanager
def patience_of(args: argparse.Namespace, usual_s: float = TIME_LIMIT_S) -> Iterator[Patience]:
    """Start the clock of all that the verb does, by the arguments, and show on stderr how far the searches are."""
    from planner.solver.problem.budget import Patience

    with searching() as progress:
        yield Patience.of(usual_s if args.time_limit_s is None else args.time_limit_s, progress)


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
