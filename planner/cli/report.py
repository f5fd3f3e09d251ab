"""`plan report`: all about a plan in one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.flags import as_flags
from planner.cli.simulate import add_accumulate_argument, add_plan_argument
from planner.errors import InputError, PlannerError

if TYPE_CHECKING:
    from planner.analysis.compare import Comparison
    from planner.analysis.sweep import Sweep
    from planner.formats.plan import Plan

DEFAULT_PROFILE = Path("profile.json")
FORMATS = ("html", "svg", "png")
POINTS = 9
SPREAD = 10.0  # times the plan's bandwidth, and its part

DESCRIPTION = """\
Write a report of a plan: one HTML file that needs no network, with the stages and their layers, the simulated timeline
to zoom and point at, memory over time, what limits the plan, and, from the profile, the plan beside data parallelism
and hand-made pipelines and at other bandwidths. After a training run, the run beside the simulation on the same axes.

    plan report                                 plan.json, profile.json -> report.html
    plan report --run trace.json                measured beside predicted
    plan report -o timeline.svg                 the timeline alone, as a picture; .png too
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "report",
        help="write a plan's stages, timeline, memory and alternatives as one HTML file",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_plan_argument(parser)
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help=f"the profile of the plan, for what else there is (default: {DEFAULT_PROFILE}, if it is that)",
    )
    parser.add_argument(
        "--run",
        dest="measured",
        type=Path,
        metavar="FILE",
        help="a run of the plan: a trace or a timeline, shown beside the simulation",
    )
    parser.add_argument(
        "--minibatches",
        type=int,
        metavar="N",
        help="simulate so many (default: enough for a steady state)",
    )
    add_accumulate_argument(parser)
    parser.add_argument(
        "--points",
        type=int,
        default=POINTS,
        metavar="N",
        help="bandwidths of the sweep, from a tenth to ten times the plan's; 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="svg and png: the timeline alone (default: by the name of the file, or html)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to (default: report.FORMAT)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Gather, and write the file."""
    from planner.analysis.sweep import MOST_POINTS
    from planner.formats.files import write_bytes, write_text
    from planner.formats.plan import load_plan
    from planner.report.page.page import ReportContent, report_page
    from planner.report.svg.png import png
    from planner.report.svg.timeline import timeline_svg
    from planner.report.trace import load_run
    from planner.simulator.plan import simulate
    from planner.simulator.recorded import simulate_recorded

    style, output = _style(args)
    if args.points != 0 and not 2 <= args.points <= MOST_POINTS:
        raise InputError(f"{args.points} points make no sweep", hint=f"give --points from 2 to {MOST_POINTS}, or 0")
    plan = load_plan(args.plan)
    measured = None if args.measured is None else load_run(args.measured)
    if measured is not None and args.minibatches is not None:
        raise InputError(
            "--minibatches has no meaning with --run, which says so itself", hint="leave out one of the two"
        )
    if measured is not None and args.accumulate is not None:
        raise InputError("--accumulate has no meaning with --run, which knows it", hint="leave out one of the two")
    if measured is None:
        simulated = simulate(plan, args.minibatches, args.accumulate or 1)
    else:
        simulated = simulate_recorded(plan, measured)
    if style == "html":
        comparison, sweep, why_not = _alternatives(args, plan)
        write_text(output, report_page(ReportContent(plan, simulated, measured, comparison, sweep, why_not)))
    else:
        picture = timeline_svg([simulated] if measured is None else [simulated, measured])
        if style == "svg":
            write_text(output, picture)
        else:
            write_bytes(output, png(picture))
    print(f"written to {output}", file=sys.stderr)
    return 0


def _style(args: argparse.Namespace) -> tuple[str, Path]:
    """The format and the file.

    Raises:
        InputError: for a file's name that says another format.
    """
    output: Path | None = args.output
    suffix = "" if output is None else output.suffix.lower().removeprefix(".")
    if args.format is None and suffix in ("pdf", "jpg", "jpeg", "gif"):
        raise InputError(
            f"'{output}' is not a format of reports, which are {', '.join(FORMATS)}",
            hint="print report.html from a browser, or convert a picture",
        )
    style = args.format or (suffix if suffix in FORMATS else "html")
    return style, output or Path(f"report.{style}")


def _alternatives(args: argparse.Namespace, plan: Plan) -> tuple[Comparison | None, Sweep | None, str]:
    """The comparison and the sweep, or why there is none.

    Raises:
        PlannerError: where a profile was named, and is not the plan's.
    """
    from planner.analysis.bandwidths import bandwidth_sweep
    from planner.analysis.compare import compare
    from planner.formats.pipedream import read_profile

    path = args.profile or DEFAULT_PROFILE
    if args.profile is None and not path.exists():
        return (
            None,
            None,
            f"The comparison and the bandwidths: there is no {path}; name the plan's profile with --profile.",
        )
    try:
        profile = read_profile(path)
        comparison = compare(profile, plan=plan)
    except PlannerError as error:
        if args.profile is not None:
            raise
        return None, None, f"The comparison and the bandwidths: {as_flags(error.message)}."
    if args.points == 0:
        return comparison, None, ""
    if sys.stderr.isatty():
        print("solving for other bandwidths (--points 0 leaves them out)", file=sys.stderr)
    return comparison, bandwidth_sweep(profile, plan, args.points, SPREAD), ""
