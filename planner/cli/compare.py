"""`plan compare`: the chosen plan beside what one would do without a planner."""

from __future__ import annotations

import argparse

from planner.cli.arguments import Verbs, add_question_arguments, declare, patience_of, plan_of
from planner.cli.output import print_answer

DESCRIPTION = """\
Compare the fastest plan, or --plan, with what one would do without a planner: data parallelism, the best pipeline
without replicas, stages of equal numbers of layers, equal parameters or equal time, and GPipe with the plan's own
stages. All are priced on the same cluster by the same cost model and, with the default one, by simulation.

    plan compare --gpus 8 --bandwidth 10Gbps
    plan compare --plan plan.json
    plan compare --plan plan.json --topology 4x2 --bandwidth 128Gbps,10Gbps     its stages on another cluster
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "compare", "compare a plan with data parallelism and hand-made pipelines", DESCRIPTION)
    add_question_arguments(parser, plan=True)


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    from planner.analysis.compare import compare
    from planner.formats.importers import read_one_profile
    from planner.report.tables.compare import comparison_report

    with patience_of(args) as patience:
        profile = read_one_profile(args.profile)
        comparison = compare(profile, plan=plan_of(args, profile, patience), patience=patience)
    print_answer(comparison, args.json, comparison_report)
    return 0
