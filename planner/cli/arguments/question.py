"""The arguments of the verbs that ask about plans: which profile, which plan, and how to solve."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments.cluster import add_cluster_arguments, cluster_of
from planner.cli.arguments.numbers import at_least
from planner.cli.arguments.rules import RULES, add_rule_arguments, rules_of
from planner.cli.arguments.time_limit import add_time_limit_argument, shown
from planner.cli.arguments.verb import PLAN, PROFILE, given, refuse
from planner.formats.names import COST_MODEL_NAMES
from planner.schedule.instructions import MICROBATCHES_PER_GPU
from planner.schedule.registry import DEFAULT, NAMES, SCHEDULES, find

if TYPE_CHECKING:
    from planner.analysis.solve_options import SolveOptions
    from planner.formats.plan import Plan
    from planner.formats.profile import Profile
    from planner.solver.problem.budget import Patience

_CLUSTER = (
    "gpus",
    "topology",
    "bandwidth",
    "latency",
    "own_links",
    "no_overlap",
    "cluster",
    "memory",
    "kinds",
    "compress",
    "sequence_parallel",
)
SOLVING = 0.5  # share of the time for the plan that a question is about
_SOLVING = ("schedule", "microbatches", "minibatch", "cost_model", "accept_divided_loss")


def add_question_arguments(parser: argparse.ArgumentParser, plan: bool) -> None:
    """Declare the cluster's arguments and how to solve; with `plan`, also a plan that says both."""
    add_cluster_arguments(parser)
    parser.add_argument(
        "--profile",
        default=str(PROFILE),
        metavar="FILE",
        help="profile to read, from `plan profile` or a graph.txt that PipeDream published; or one for each kind of "
        "GPU, as in a100=a.json,t4=b.json (default: %(default)s)",
    )
    if plan:
        parser.add_argument(
            "--plan",
            type=Path,
            metavar="FILE",
            help="plan made from that profile, with its own schedule, on its own cluster or on the one that the "
            "arguments describe (default: the fastest plan for the cluster that the arguments describe; "
            f"{PLAN} where they describe none)",
        )
    parser.add_argument(
        "--schedule",
        choices=[schedule.name for schedule in SCHEDULES if not schedule.chunked],
        help=f"as for `plan solve` (default: {DEFAULT})",
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help=f"as for `plan solve` (default: {MICROBATCHES_PER_GPU} per GPU)"
    )
    add_minibatch_argument(parser)
    add_loss_argument(parser)
    add_rule_arguments(parser)
    parser.add_argument(
        "--cost-model",
        choices=COST_MODEL_NAMES,
        help="as for `plan solve` (default: resource)",
    )
    add_time_limit_argument(parser)


def add_minibatch_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the size of minibatches in samples."""
    parser.add_argument(
        "--minibatch",
        type=at_least(1),
        metavar="SIZE",
        help="samples per minibatch, a multiple of the profile's batch size, in place of --microbatches; every "
        "candidate keeps it",
    )


def add_loss_argument(parser: argparse.ArgumentParser) -> None:
    """Declare what to do with a loss that no division of minibatches leaves as it is."""
    parser.add_argument(
        "--accept-divided-loss",
        action="store_true",
        default=None,
        help="plan schedules that divide minibatches also where the profile found that the loss is no mean over "
        "samples or labels, such as a contrastive one: training then takes the mean of the microbatches' losses",
    )


def options_of(args: argparse.Namespace, patience: Patience) -> SolveOptions:
    """Return how to solve, by the arguments."""
    from planner.analysis.solve_options import SolveOptions

    asked = {name: getattr(args, name, None) for name in (*_SOLVING, "depth", "chunks")}
    if args.schedule in NAMES:
        asked["schedule"] = find(args.schedule)
    rules = rules_of(args)
    return SolveOptions(
        patience=patience, rules=rules, **{name: value for name, value in asked.items() if value is not None}
    )


@contextmanager
def patience_of(args: argparse.Namespace) -> Iterator[Patience]:
    """Start the clock of all that the verb does, by the arguments, and show on stderr how far the searches are."""
    from planner.solver.problem.budget import Patience

    with shown() as progress:
        yield Patience.of(args.time_limit, progress)


def plan_of(args: argparse.Namespace, profile: Profile, patience: Patience) -> Plan:
    """Return the plan of --plan, or the fastest for the arguments' cluster, or plan.json where neither is given.

    With --plan and a cluster, return the plan's stages as they are on that cluster.

    Raises:
        InputError: for --plan with arguments that say how to solve, or with a cluster of fewer GPUs.
    """
    from planner.analysis.given_plan import GivenPlan
    from planner.formats.plan import load_plan

    path = args.plan
    if path is None and PLAN.exists() and not any(given(args, name) for name in _CLUSTER):
        path = PLAN
    if path is None:
        return options_of(args, patience).within(SOLVING).solve(profile, cluster_of(args, profile))
    refuse(args, "plan", *_SOLVING, *RULES, why=", which says so itself")
    plan = load_plan(path)
    if not any(given(args, name) for name in _CLUSTER):
        return plan
    return GivenPlan.of(profile, plan).on(cluster_of(args, profile))
