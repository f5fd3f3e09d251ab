"""`plan compare`: the chosen plan beside what one would do without a planner."""

from __future__ import annotations

import argparse

from planner.cli.arguments.question import add_question_arguments, plan_of
from planner.cli.output import print_answer

DESCRIPTION = """\
Show the fastest plan, or --plan, beside data parallelism, the best pipeline without replicas, stages of equal layers,
equal parameters and equal time, and GPipe on the plan's own cut: all on the same cluster, by the same cost model, with
the waits of the simulated schedule.

    plan compare --gpus 8 --bandwidth 10Gbps
    plan compare --plan plan.json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "compare",
        help="show a plan beside data parallelism and hand-made pipelines",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_question_arguments(parser, plan=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    from planner.analysis.compare import compare
    from planner.formats.pipedream import read_profile
    from planner.report.tables.compare import comparison_report

    profile = read_profile(args.profile)
    comparison = compare(profile, plan=plan_of(args, profile))
    print_answer(comparison, args.json, comparison_report)
    return 0
