"""What else a plan says: `show` and `simulate` it, `compare` and `explain` it, and a page with all
of that.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import planner
from planner.cli import arguments, output
from planner.cli.parser import Advanced
from planner.options.numbers import count
from planner.options.solving import SolveOptions
from planner.options.verbs import ReportOptions, ScheduleOptions

REPORT = Path("report.html")
SHOW = """\
Show a plan or a profile: the files that the other verbs write.

    plan show                                          plan.json
    plan show profile.json --by time --top 10          the ten slowest layers
"""
SIMULATE = """\
Simulate a plan: follow the instructions of every worker, with the times and messages of the plan,
on its cluster's links. Prints samples per second, the bubble, how busy each worker and link is, and
each worker's peak memory.

    plan simulate --minibatches 100
    plan simulate --trace trace.json       open it at https://ui.perfetto.dev
    plan simulate --against run.json       compare with what `plan train --trace run.json` recorded
"""
COMPARE = """\
Compare a plan with what one would do without a planner: data parallelism, pipelines of equal blocks
and of equal times, and GPipe with the plan's own stages. All are priced on the plan's cluster by
the same cost model and by simulation. With --schedules or --microbatches, compare the best plans
under several schedules on that cluster:

    plan compare --schedules 1f1b-flush,zb-h1,gpipe --microbatches 4,8,16 --csv schedules.csv
"""
EXPLAIN = """\
Explain what limits a plan: the busiest resource, the slack of all others, and what more bandwidth,
one more GPU or more memory would gain.
"""
REPORT_TEXT = """\
Write a report on a plan: one HTML file that needs no network. It shows the stages and their layers,
the simulated timeline to zoom and point at, memory over time and what limits the plan. With the
profile, it compares the plan with data parallelism and hand-made pipelines, and says what would
make it faster. With --run, it shows a training run and its simulation on the same axes.

    plan report                                 plan.json, profile.json -> report.html
    plan report --open                          and shows it in the browser
    plan report --run trace.json                measured next to predicted
"""


def add_show(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    parser = arguments.declare(verbs, "show", "show a plan or a profile as tables", SHOW, show)
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=arguments.PLAN,
        help="plan or profile (default: %(default)s)",
    )
    parser.add_argument(
        "--by",
        choices=["order", "time", "output", "weights", "saved"],
        default="order",
        help=Advanced(
            "sort a profile's layers: in the order of execution, or the largest first (default: "
            "%(default)s)"
        ),
    )
    help = Advanced("show only the first N layers of a profile (default: all)")
    parser.add_argument("--top", type=count, metavar="N", help=help)


def add_questions(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    compare = "compare a plan with data parallelism and hand-made pipelines"
    explain = "explain what limits a plan, and what would make it faster"
    for name, summary, text in (("compare", compare, COMPARE), ("explain", explain, EXPLAIN)):
        parser = arguments.declare(verbs, name, summary, text, run_question)
        arguments.add_plan_argument(parser)
        arguments.add_profile_argument(parser)
        arguments.add_options(parser, SolveOptions, "time_limit_s")
        if name == "compare":
            add_schedules(parser)


def add_schedules(parser: argparse.ArgumentParser) -> None:
    """Let `compare` compare schedules in place of baselines."""
    group = parser.add_argument_group("schedules, in place of baselines")
    arguments.add_options(group, ScheduleOptions, "schedules", "microbatches", "max_stages")
    help = Advanced("write the rows as comma-separated values")
    group.add_argument("--csv", type=Path, metavar="FILE", help=help)
    help = Advanced("draw samples per second over the global batch as SVG")
    group.add_argument("--plot", type=Path, metavar="FILE", help=help)


def add_simulate(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    parser = arguments.declare(
        verbs, "simulate", "show what a plan's workers and links do over time", SIMULATE, simulate
    )
    arguments.add_plan_argument(parser)
    arguments.add_options(parser, ReportOptions, "minibatches")
    help = "write every event as a Chrome trace, which Perfetto opens"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=help)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help=Advanced(
            "a run of the plan, as a trace or a timeline: simulate the same minibatches, and "
            "compare pace, bubble and "
            "the times of stages"
        ),
    )


def add_report(verbs: arguments.Verbs) -> None:
    """Declare the verb and its flags."""
    parser = arguments.declare(
        verbs, "report", "write all about a plan to one HTML file", REPORT_TEXT, report
    )
    arguments.add_plan_argument(parser)
    arguments.add_options(parser, ReportOptions)
    arguments.add_output_argument(parser, told=str(REPORT))
    help = Advanced("open it in the browser")
    parser.add_argument("--open", action="store_true", help=help)


def show(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.api.planning import plan_or_profile

    shown = plan_or_profile(args.file)
    if isinstance(shown, planner.Plan):
        output.print_plan(shown, args)
    else:
        output.print_answer(shown, args.json, planner.show(shown, by=args.by, top=args.top))
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.analysis.compare_runs import compare_runs
    from planner.api.planning import timelines
    from planner.reporting.tables.runs import run_comparison_report, run_report
    from planner.reporting.trace import save_trace

    plan = planner.load_plan(args.plan)
    timeline, measured = timelines(
        plan, arguments.read_options(ReportOptions, args), args.against, "against"
    )
    keeping: AbstractContextManager[None] = nullcontext()
    if args.trace is not None:
        keeping = output.saving(partial(save_trace, timeline, args.trace), args.trace)

    with keeping:
        if measured is None:
            summary = planner.summarize(timeline)
            output.print_answer(summary, args.json, run_report(summary, plan))
        else:
            comparison = compare_runs(timeline, measured)
            output.print_answer(comparison, args.json, run_comparison_report(comparison, plan))

    return 0


def report(args: argparse.Namespace) -> int:
    """Run the verb, and return its exit code."""
    from planner.formats.files import check_writable

    path = args.output or REPORT
    check_writable(path)
    with output.searching() as progress:
        planner.report(
            args.plan, path, **arguments.given_options(ReportOptions, args), progress=progress
        )

    output.print_written(path, as_json=args.json)
    if args.open:
        _show_in_browser(path)
    return 0


def _show_in_browser(path: Path) -> None:
    import webbrowser  # which no other verb needs

    if not webbrowser.open(path.resolve().as_uri()):
        hint = f"open {path} yourself"
        output.print_complaint("warning", "no browser was found on this machine", hint)


def compare_schedules(args: argparse.Namespace) -> int:
    """Compare schedules on the plan's cluster, print the rows, and write them where asked."""
    from planner.formats.device_kinds import read_profile

    cluster = planner.load_plan(args.plan).cluster
    given = arguments.given_options(ScheduleOptions, args)
    with output.searching() as progress:
        answer = planner.compare_schedules(
            read_profile(args.profile), cluster, **given | {"progress": progress}
        )

    output.print_answer(answer, args.json)
    if args.csv is not None:
        answer.to_csv(args.csv)
    if args.plot is not None:
        answer.plot().save(args.plot)
    for path in (args.csv, args.plot):
        if path is not None and not args.json:  # one document
            output.print_written(path, as_json=False)

    return 0


def run_question(args: argparse.Namespace) -> int:
    """Compare or explain the plan of the arguments, and print the answer."""
    from planner.formats.device_kinds import read_profile
    from planner.reporting.tables.answers import explanation_report

    if args.verb == "compare" and (args.schedules or args.microbatches or args.csv or args.plot):
        return compare_schedules(args)
    question: Callable[..., Any] = getattr(planner, args.verb)
    with arguments.clock_of(args) as clock:
        answer = question(read_profile(args.profile), planner.load_plan(args.plan), clock=clock)
    table = None
    if args.verb == "explain":
        table = explanation_report(answer, verbose=output.is_verbose(args))
    output.print_answer(answer, args.json, table)
    return 0
