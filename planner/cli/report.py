"""`plan report`: all about a plan in one HTML file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.alternatives import POINTS
from planner.cli.arguments import (
    PROFILE,
    Verbs,
    add_options,
    add_plan_argument,
    add_simulation_arguments,
    declare,
    patience_of,
)
from planner.cli.flags import as_flags, refuse
from planner.cli.output import print_written
from planner.errors import InputError, PlannerError
from planner.options.solving import SolveOptions

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.timeline import Timeline
    from planner.report.page.page import ReportContent
    from planner.solver.problem.budget import Patience

COMPARING = 0.3  # share of the time for the comparison
EXPLAINING = 0.4  # share of the time left for the explanation; the rest is for the bandwidths
TIME_LIMIT = "7s"  # with what simulation and page take besides, a report of 56 stages is there within 10 s
FORMATS = ("html", "svg")
SPREAD = 10.0  # the sweep's bandwidths: from the plan's divided by this to the plan's multiplied by it

DESCRIPTION = """\
Write a report on a plan: one HTML file that needs no network. It shows the stages and their layers, the simulated
timeline to zoom and point at, memory over time and what limits the plan. With the profile, it compares the plan with
data parallelism and hand-made pipelines, says what would make it faster, and plans for other bandwidths. With --run,
it shows a training run and its simulation on the same axes.

    plan report                                 plan.json, profile.json -> report.html
    plan report --run trace.json                measured beside predicted
    plan report -o timeline.svg                 the timeline alone, as a picture
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "report", "write all about a plan to one HTML file", DESCRIPTION, run)
    add_plan_argument(parser)
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="profile that the plan was made from, for the comparisons; where it has several kinds of GPUs, as in "
        f"a100=a.json,t4=b.json (default: {PROFILE}, if it is that one)",
    )
    parser.add_argument(
        "--run",
        dest="measured",
        type=Path,
        metavar="FILE",
        help="a run of the plan, as a trace or a timeline, to show beside the simulation",
    )
    add_simulation_arguments(parser)
    parser.add_argument(
        "--points",
        type=int,
        default=POINTS,
        metavar="N",
        help="solve for N bandwidths, from a tenth to ten times the plan's; 0 for none (default: %(default)s)",
    )
    add_options(parser, SolveOptions, "time_limit_s", default=TIME_LIMIT)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="svg shows the timeline alone (default: that of the file's name, or html)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: report.FORMAT)")


def run(args: argparse.Namespace) -> int:
    """Gather, and write the file."""
    from planner.analysis.compare import with_rows
    from planner.analysis.sweep import MOST_POINTS
    from planner.formats.files import write_text
    from planner.formats.plan import load_plan
    from planner.report.page.page import ReportContent, report_page
    from planner.report.svg.timeline import timeline_svg
    from planner.report.timeline import opening
    from planner.simulator.summary import summarize

    style, output = _style(args)
    if args.points != 0 and not 2 <= args.points <= MOST_POINTS:
        raise InputError(f"{args.points} points make no sweep", hint=f"give `points` from 2 to {MOST_POINTS}, or 0")
    plan = load_plan(args.plan)
    simulated, measured = _timelines(args, plan)
    if style == "svg":
        runs = [simulated] if measured is None else [simulated, measured]
        shown = opening(summarize(simulated), simulated, max(run.span_s for run in runs))
        written = timeline_svg(runs, shown)
    else:
        with patience_of(args) as patience:
            content = _alternatives(args, ReportContent(plan, simulated, measured), patience)
        if content.comparison is not None:
            content = replace(content, plan=with_rows(plan, content.comparison))
        written = report_page(content)
    write_text(output, written)
    print_written(output, as_json=args.json)
    return 0


def _timelines(args: argparse.Namespace, plan: Plan) -> tuple[Timeline, Timeline | None]:
    """Return the simulation, and the run if there is one."""
    from planner.report.trace import load_run
    from planner.simulator.recorded import simulate_recorded
    from planner.simulator.simulate_plan import simulate

    if args.measured is None:
        return simulate(plan, args.minibatches, args.accumulate or 1), None
    refuse(args, "measured", "minibatches", "accumulate", why=", which knows it")
    measured = load_run(args.measured)
    return simulate_recorded(plan, measured), measured


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


def _alternatives(args: argparse.Namespace, content: ReportContent, patience: Patience) -> ReportContent:
    """Add what takes the profile: comparison, explanation and sweep; or why they are missing.

    Raises:
        PlannerError: when the user named a profile, and it is not the plan's.
    """
    from planner.analysis.compare import compare
    from planner.analysis.explain import explain
    from planner.analysis.sweep import bandwidth_sweep
    from planner.formats.importers import read_one_profile

    plan = content.plan
    missing = "The comparison, what would help, and other bandwidths"
    if args.profile is None and not PROFILE.exists():
        return replace(content, why_not=f"{missing}: there is no {PROFILE}; name a profile with --profile.")
    try:
        profile = read_one_profile(args.profile or str(PROFILE))
        comparison = compare(profile, plan=plan, patience=patience.part(COMPARING))
    except PlannerError as error:
        if args.profile is not None:
            raise
        return replace(content, why_not=f"{missing}: {as_flags(error.message)}.")
    explanation = explain(profile, plan, patience=patience.part(EXPLAINING))
    source = profile.provenance.source
    content = replace(content, comparison=comparison, explanation=explanation, source=source)
    if args.points == 0:
        return content
    return replace(content, sweep=bandwidth_sweep(profile, plan, args.points, SPREAD, patience))
