"""`plan show`, `plan simulate` and `plan report`: a plan as tables, as a timeline, and as a page."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import planner
from planner.cli.alternatives import POINTS
from planner.cli.arguments import (
    PLAN,
    PROFILE,
    Verbs,
    add_options,
    add_output_argument,
    add_plan_argument,
    add_simulation_arguments,
    declare,
    patience_of,
)
from planner.cli.output import as_flags, print_answer, print_written, refuse
from planner.errors import InputError, PlannerError
from planner.options.numbers import at_least
from planner.options.solving import SolveOptions

if TYPE_CHECKING:
    from planner.solver.problem.budget import Patience

COMPARING = 0.3  # share of the time for the comparison
EXPLAINING = 0.4  # share of the time left for the explanation; the rest is for the bandwidths
TIME_LIMIT = "7s"  # with what simulation and page take besides, a report of 56 stages is there within 10 s
FORMATS = ("html", "svg")
SPREAD = 10.0  # the sweep's bandwidths: from the plan's divided by this to the plan's multiplied by it

SHOW = """\
Show a plan or a profile: the files that the other verbs write, or a graph.txt that PipeDream published.

    plan show                                          plan.json
    plan show profile.json --by time --top 10          the ten slowest layers
    plan show profile.json --format svg > profile.svg
"""
SIMULATE = """\
Simulate a plan: follow the instructions of every worker, with the times and messages of the plan, on its cluster's
links. Prints samples per second, the bubble, how busy each worker and link is, and each worker's peak memory.

    plan simulate --minibatches 100
    plan simulate --trace trace.json          open it at https://ui.perfetto.dev
    plan simulate --against run.json          compare with what `plan train --trace run.json` recorded
"""
REPORT = """\
Write a report on a plan: one HTML file that needs no network. It shows the stages and their layers, the simulated
timeline to zoom and point at, memory over time and what limits the plan. With the profile, it compares the plan with
data parallelism and hand-made pipelines, says what would make it faster, and plans for other bandwidths. With --run,
it shows a training run and its simulation on the same axes.

    plan report                                 plan.json, profile.json -> report.html
    plan report --run trace.json                measured beside predicted
    plan report -o timeline.svg                 the timeline alone, as a picture
"""


def add_show(verbs: Verbs) -> None:
    """Declare the arguments of `plan show`."""
    parser = declare(verbs, "show", "show a plan or a profile as tables", SHOW, show)
    parser.add_argument("file", type=Path, nargs="?", default=PLAN, help="plan or profile (default: %(default)s)")
    parser.add_argument(
        "--by",
        choices=["order", "time", "output", "weights", "saved"],
        default="order",
        help="sort a profile's layers: in the order of execution, or the largest first (default: %(default)s)",
    )
    help = "show only the first N layers of a profile (default: all)"
    parser.add_argument("--top", type=at_least(1), metavar="N", help=help)
    parser.add_argument(
        "--format",
        choices=["table", "json", "svg", "graph.txt"],
        default="table",
        help="how to print; svg (a plot of the layers' times and bytes) and graph.txt (PipeDream's format, for its "
        "optimizer and tools that read it) are for profiles (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")


def add_simulate(verbs: Verbs) -> None:
    """Declare the arguments of `plan simulate`."""
    parser = declare(verbs, "simulate", "show what a plan's workers and links do over time", SIMULATE, simulate)
    add_plan_argument(parser)
    add_simulation_arguments(parser)
    help = "write every event as a Chrome trace, which Perfetto opens"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=help)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="a run of the plan, as a trace or a timeline: simulate the same minibatches, and print how far apart each "
        "forward and backward starts and ends",
    )


def add_report(verbs: Verbs) -> None:
    """Declare the arguments of `plan report`."""
    parser = declare(verbs, "report", "write all about a plan to one HTML file", REPORT, report)
    add_plan_argument(parser)
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="profile that the plan was made from, for the comparisons; where it has several kinds of GPUs, as in "
        f"a100=a.json,t4=b.json (default: {PROFILE}, if it is that one)",
    )
    help = "a run of the plan, as a trace or a timeline, to show beside the simulation"
    parser.add_argument("--run", dest="measured", type=Path, metavar="FILE", help=help)
    add_simulation_arguments(parser)
    help = "solve for N bandwidths, from a tenth to ten times the plan's; 0 for none (default: %(default)s)"
    parser.add_argument("--points", type=int, default=POINTS, metavar="N", help=help)
    add_options(parser, SolveOptions, "time_limit_s", default=TIME_LIMIT)
    help = "svg shows the timeline alone (default: that of the file's name, or html)"
    parser.add_argument("--format", choices=FORMATS, help=help)
    add_output_argument(parser, told="report.FORMAT")


def show(args: argparse.Namespace) -> int:
    """Print the file's content."""
    from planner.formats.importers import is_profile, read_profile
    from planner.formats.pipedream import graph_txt
    from planner.reporting.svg import profile_svg
    from planner.reporting.tables.plan import plan_report
    from planner.reporting.tables.profile import profile_report

    if is_profile(args.file):
        profile = read_profile(args.file)
        match args.format:
            case "table":
                print(profile_report(profile, by=args.by, top=args.top))
            case "svg":
                print(profile_svg(profile))
            case "graph.txt":
                print(graph_txt(profile).rstrip("\n"))
            case _:
                print(profile.model_dump_json(indent=1))
        return 0
    plan = planner.load_plan(args.file)
    if args.format not in ("table", "json"):
        what = f"`format={args.format}` is for profiles, and '{args.file}' is a plan"
        raise InputError(what, hint="name a profile")
    print_answer(plan, args.format == "json", plan_report)
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Simulate, print, and write the trace."""
    from planner.analysis.compare_runs import compare_runs
    from planner.reporting.tables.runs import run_comparison_report, run_report
    from planner.reporting.trace import save_trace

    plan = planner.load_plan(args.plan)
    timeline, measured = _timelines(args, plan, "against")
    if measured is None:
        print_answer(planner.summarize(timeline), args.json, partial(run_report, plan=plan))
    else:
        print_answer(compare_runs(plan, timeline, measured), args.json, partial(run_comparison_report, plan=plan))
    if args.trace is not None:
        save_trace(timeline, args.trace)
        print_written(args.trace)
    return 0


def _timelines(
    args: argparse.Namespace, plan: planner.Plan, run: str
) -> tuple[planner.Timeline, planner.Timeline | None]:
    """Return the simulation, and the run that an argument names if it does: then of the run's minibatches."""
    from planner.reporting.trace import load_run
    from planner.simulator.simulate_plan import simulate_recorded

    if getattr(args, run) is None:
        return planner.simulate(plan, args.minibatches, args.accumulate or 1), None
    refuse(args, run, "minibatches", "accumulate", why=", which knows it")
    measured = load_run(getattr(args, run))
    return simulate_recorded(plan, measured), measured


def report(args: argparse.Namespace) -> int:
    """Gather, and write the file."""
    from planner.analysis.compare import with_rows
    from planner.analysis.sweep import MOST_POINTS
    from planner.formats.files import write_text
    from planner.reporting.page.page import report_page
    from planner.reporting.svg import timeline_svg
    from planner.reporting.timeline import opening

    style, output = _style(args)
    if args.points != 0 and not 2 <= args.points <= MOST_POINTS:
        raise InputError(f"{args.points} points make no sweep", hint=f"give `points` from 2 to {MOST_POINTS}, or 0")
    plan = planner.load_plan(args.plan)
    simulated, measured = _timelines(args, plan, "measured")
    if style == "svg":
        runs = [simulated] if measured is None else [simulated, measured]
        shown = opening(planner.summarize(simulated), simulated, max(run.span_s for run in runs))
        written = timeline_svg(runs, shown)
    else:
        with patience_of(args) as patience:
            alternatives = _alternatives(args, plan, patience)
        if comparison := alternatives.get("comparison"):
            plan = with_rows(plan, comparison)
        written = report_page(plan, simulated, measured, **alternatives)
    write_text(output, written)
    print_written(output, as_json=args.json)
    return 0


def _style(args: argparse.Namespace) -> tuple[str, Path]:
    """Return the format and the file; raise InputError when the file's name ends in another format."""
    output: Path | None = args.output
    suffix = "" if output is None else output.suffix.lower().removeprefix(".")
    if args.format is None and suffix not in ("", "htm", *FORMATS):
        raise InputError(
            f"'{output}' is not a format of reports, which are {', '.join(FORMATS)}",
            hint="print report.html from a browser, or convert a picture",
        )
    style = args.format or (suffix if suffix in FORMATS else "html")
    return style, output or Path(f"report.{style}")


def _alternatives(args: argparse.Namespace, plan: planner.Plan, patience: Patience) -> dict[str, Any]:
    """Return what of the report takes the profile: comparison, explanation and sweep; or why they are missing.

    Raises:
        PlannerError: when the user named a profile, and it is not the plan's.
    """
    from planner.analysis.sweep import bandwidth_sweep
    from planner.formats.importers import read_one_profile

    missing = "The comparison, what would help, and other bandwidths"
    if args.profile is None and not PROFILE.exists():
        return {"why_not": f"{missing}: there is no {PROFILE}; name a profile with --profile."}
    try:
        profile = read_one_profile(args.profile or str(PROFILE))
        comparison = planner.compare(profile, plan=plan, patience=patience.part(COMPARING))
    except PlannerError as error:
        if args.profile is not None:
            raise
        return {"why_not": f"{missing}: {as_flags(error.message)}."}
    explanation = planner.explain(profile, plan, patience=patience.part(EXPLAINING))
    sweep = bandwidth_sweep(profile, plan, args.points, SPREAD, patience) if args.points else None
    source = profile.provenance.source
    return {"comparison": comparison, "explanation": explanation, "sweep": sweep, "source": source}
