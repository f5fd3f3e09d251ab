"""`plan explain`: what limits a plan."""

from __future__ import annotations

import argparse

from planner.cli.arguments import Verbs, add_question_arguments, declare, patience_of, plan_of
from planner.cli.output import print_answer

DESCRIPTION = """\
Explain what limits the fastest plan, or --plan: the busiest resource and the slack of all others, what it would cost
to move each stage boundary by one layer, the best plan with another config, and what more bandwidth, one more GPU or
more memory would gain.

    plan explain --gpus 8 --bandwidth 10Gbps
    plan explain --plan plan.json
    plan explain --plan plan.json --gpus 8 --bandwidth 1Gbps     its stages on another cluster
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "explain", "explain what limits a plan, and what would make it faster", DESCRIPTION)
    add_question_arguments(parser, plan=True)


def run(args: argparse.Namespace) -> int:
    """Explain and print."""
    from planner.analysis.explain import explain
    from planner.formats.importers import read_one_profile
    from planner.report.tables.explain import explanation_report

    with patience_of(args) as patience:
        profile = read_one_profile(args.profile)
        explanation = explain(profile, plan_of(args, profile, patience), patience=patience)
    print_answer(explanation, args.json, explanation_report)
    return 0
