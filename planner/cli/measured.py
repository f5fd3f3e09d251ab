"""`plan solve --run`: the cluster of a plan that was run, as its run measured it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import planner
from planner.cli import arguments, output
from planner.errors import ClusterError
from planner.options.cluster import ClusterOptions

if TYPE_CHECKING:
    from planner.analysis.measured_cluster import MeasuredCluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --run and --plan; `given` reads them."""
    group = parser.add_argument_group("a run, in place of a cluster")
    help = (
        "a run of --plan, from `plan train --trace`: solve for its cluster, with devices and "
        "links as fast as the run found them"
    )
    group.add_argument("--run", "--measured", type=Path, metavar="FILE", help=help)
    help = "with --run: the plan that was run (default: %(default)s)"
    group.add_argument("--plan", type=Path, default=arguments.PLAN, metavar="FILE", help=help)


def given(args: argparse.Namespace) -> tuple[planner.Plan, MeasuredCluster] | None:
    """Return the plan that was run, and its cluster as measured; None without --run.

    Raise ClusterError where the arguments describe a cluster, too.
    """
    if args.run is None:
        return None
    if described := arguments.given_options(ClusterOptions, args):
        raise ClusterError(
            f"`run={args.run}` is a run on the cluster of '{args.plan}', and "
            f"`{next(iter(described))}` describes another",
            hint="give one of the two",
        )

    plan = planner.load_plan(args.plan)
    return plan, planner.measured_cluster(plan, args.run)


def print_measured(
    profile: planner.Profile, ran: planner.Plan, found: MeasuredCluster, plan: planner.Plan
) -> None:
    """Print what the run measured, and what the new plan gains over the one that was run."""
    from planner.analysis.measured_cluster import on_cluster
    from planner.reporting.tables.runs import gain_sentence, measured_cluster_sentences

    for sentence in measured_cluster_sentences(ran, found):
        output.print_progress(f"measured: {sentence}")

    there = on_cluster(profile, ran, found.cluster)
    output.print_progress(f"measured: {gain_sentence(there, plan)}")
