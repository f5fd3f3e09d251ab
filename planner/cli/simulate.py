"""`plan simulate`: what a plan would do, event by event, without running it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import InputError

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.timeline import Timeline

DESCRIPTION = """\
Simulate a plan: the instructions of every worker at the plan's times, on the links of its cluster. Prints the samples
per second, the bubble, how busy every worker and link is, and the peak of every worker's memory.

    plan simulate --minibatches 100
    plan simulate --trace trace.json          open it at https://ui.perfetto.dev
    plan simulate --against run.json          beside what plan train --trace run.json recorded: how far events are apart
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "simulate",
        help="show what a plan's workers and links do, over time",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_plan_argument(parser)
    parser.add_argument(
        "--minibatches", type=int, metavar="N", help="simulate so many (default: enough for a steady state)"
    )
    add_accumulate_argument(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write every event as a Chrome trace, which Perfetto opens"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="a run of the plan, a trace or a timeline: simulate its minibatches, and print how far the start and the "
        "end of each forward and backward lie from the run's",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=run)


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """--plan of the verbs that read a plan and nothing else."""
    parser.add_argument(
        "--plan", type=Path, default=Path("plan.json"), metavar="FILE", help="the plan (default: %(default)s)"
    )


def add_accumulate_argument(parser: argparse.ArgumentParser) -> None:
    """--accumulate of the verbs that simulate a plan."""
    parser.add_argument(
        "--accumulate",
        type=int,
        metavar="K",
        help="under 1f1b, an update after K minibatches per replica, as plan train has it (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, write the trace and print."""
    import sys

    from planner.formats.plan import load_plan
    from planner.report.tables.run import run_report
    from planner.report.trace import save_trace
    from planner.simulator.plan import simulate
    from planner.simulator.summary import summarize

    plan = load_plan(args.plan)
    if args.against is not None:
        timeline, text = _against(args, plan)
    else:
        timeline = simulate(plan, args.minibatches, args.accumulate or 1)
        summary = summarize(timeline)
        text = summary.model_dump_json(indent=1) if args.json else run_report(summary, plan)
    print(text)
    if args.trace is not None:
        save_trace(timeline, args.trace)
        print(f"written to {args.trace}", file=sys.stderr)
    return 0


def _against(args: argparse.Namespace, plan: Plan) -> tuple[Timeline, str]:
    """The simulation of the run's minibatches, and what to print."""
    from planner.analysis.compare_runs import compare_runs
    from planner.report.tables.compare_runs import run_comparison_report
    from planner.report.trace import load_run
    from planner.simulator.recorded import simulate_recorded

    if args.minibatches is not None:
        raise InputError(
            "--minibatches has no meaning with --against, which says so itself", hint="leave out one of the two"
        )
    if args.accumulate is not None:
        raise InputError("--accumulate has no meaning with --against, which knows it", hint="leave out one of the two")
    measured = load_run(args.against)
    timeline = simulate_recorded(plan, measured)
    found = compare_runs(plan, timeline, measured)
    return timeline, found.model_dump_json(indent=1) if args.json else run_comparison_report(found, plan)
