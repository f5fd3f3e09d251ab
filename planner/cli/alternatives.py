"""`plan compare` and `plan explain`: alternatives to a plan, and what limits it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import planner
from planner.cli import arguments, output

COMPARE = """\
Compare the fastest plan, or --plan, with what one would do without a planner: data parallelism, pipelines of equal
blocks and of equal times, and GPipe with the plan's own stages. All are priced on the same cluster by the same cost
model and, with the default one, by simulation.

    plan compare --gpus 8 --bandwidth 10Gbps
    plan compare --plan plan.json
    plan compare --plan plan.json --topology 4x2 --bandwidth 128Gbps,10Gbps     its stages on another cluster
"""
EXPLAIN = """\
Explain what limits the fastest plan, or --plan: the busiest resource, the slack of all others, and what
more bandwidth, one more GPU or more memory would gain.

    plan explain --gpus 8 --bandwidth 10Gbps
    plan explain --plan plan.json
    plan explain --plan plan.json --gpus 8 --bandwidth 1Gbps     its stages on another cluster
"""


def add_parser(verbs: arguments.Verbs) -> None:
    summary = "compare a plan with data parallelism and hand-made pipelines"
    arguments.add_question_arguments(arguments.declare(verbs, "compare", summary, COMPARE, run_question))
    summary = "explain what limits a plan, and what would make it faster"
    arguments.add_question_arguments(arguments.declare(verbs, "explain", summary, EXPLAIN, run_question))


def run_question(args: argparse.Namespace) -> int:
    """Compare or explain the plan of the arguments, and print the answer."""
    from planner.formats.device_kinds import read_profile

    question: Callable[..., Any] = getattr(planner, args.verb)
    with arguments.patience_of(args) as patience:
        profile = read_profile(args.profile)
        answer = question(profile, plan=arguments.plan_of(args, profile, patience), patience=patience)
    output.print_answer(answer, args.json)
    return 0
