"""`plan simulate`: what a plan would do, event by event, without running it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments import Verbs, add_plan_argument, add_simulation_arguments, declare
from planner.cli.flags import refuse
from planner.cli.output import print_answer, print_written

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.timeline import Timeline

DESCRIPTION = """\
Simulate a plan: follow the instructions of every worker, with the times and messages of the plan, on its cluster's
links. Prints samples per second, the bubble, how busy each worker and link is, and each worker's peak memory.

    plan simulate --minibatches 100
    plan simulate --trace trace.json          open it at https://ui.perfetto.dev
    plan simulate --against run.json          compare with what `plan train --trace run.json` recorded
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "simulate", "show what a plan's workers and links do over time", DESCRIPTION, run)
    add_plan_argument(parser)
    add_simulation_arguments(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write every event as a Chrome trace, which Perfetto opens"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="a run of the plan, as a trace or a timeline: simulate the same minibatches, and print how far apart each "
        "forward and backward starts and ends",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and write the trace."""
    from planner.formats.plan import load_plan
    from planner.report.trace import save_trace

    plan = load_plan(args.plan)
    timeline = _alone(args, plan) if args.against is None else _beside_run(args, plan)
    if args.trace is not None:
        save_trace(timeline, args.trace)
        print_written(args.trace)
    return 0


def _alone(args: argparse.Namespace, plan: Plan) -> Timeline:
    """Simulate, and print the summary."""
    from planner.report.tables.runs import run_report
    from planner.simulator.simulate_plan import simulate
    from planner.simulator.summary import summarize

    timeline = simulate(plan, args.minibatches, args.accumulate or 1)
    print_answer(summarize(timeline), args.json, partial(run_report, plan=plan))
    return timeline


def _beside_run(args: argparse.Namespace, plan: Plan) -> Timeline:
    """Simulate a run's minibatches, and print the comparison."""
    from planner.analysis.compare_runs import compare_runs
    from planner.report.tables.runs import run_comparison_report
    from planner.report.trace import load_run
    from planner.simulator.recorded import simulate_recorded

    refuse(args, "against", "minibatches", "accumulate", why=", which knows it")
    measured = load_run(args.against)
    timeline = simulate_recorded(plan, measured)
    print_answer(compare_runs(plan, timeline, measured), args.json, partial(run_comparison_report, plan=plan))
    return timeline
