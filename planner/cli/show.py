"""`plan show`: a plan or a profile, as tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments import PLAN, Verbs, declare
from planner.cli.flags import as_flags
from planner.errors import InputError
from planner.options.numbers import at_least

if TYPE_CHECKING:
    from planner.formats.plan import Plan
    from planner.formats.profile import Profile

DESCRIPTION = """\
Show a plan or a profile: the files that the other verbs write, or a graph.txt that PipeDream published.

    plan show                                          plan.json
    plan show profile.json --by time --top 10          the ten slowest layers
    plan show profile.json --format svg > profile.svg
"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "show", "show a plan or a profile as tables", DESCRIPTION, run)
    parser.add_argument("file", type=Path, nargs="?", default=PLAN, help="plan or profile (default: %(default)s)")
    parser.add_argument(
        "--by",
        choices=["order", "time", "output", "weights", "saved"],
        default="order",
        help="sort a profile's layers: in the order of execution, or the largest first (default: %(default)s)",
    )
    parser.add_argument(
        "--top", type=at_least(1), metavar="N", help="show only the first N layers of a profile (default: all)"
    )
    parser.add_argument(
        "--format",
        choices=["table", "json", "svg", "graph.txt"],
        default="table",
        help="how to print; svg (a plot of the layers' times and bytes) and graph.txt (PipeDream's format, for its "
        "optimizer and tools that read it) are for profiles (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")


def run(args: argparse.Namespace) -> int:
    """Print the file's content."""
    from planner.formats.importers import is_profile, read_profile
    from planner.formats.plan import load_plan

    print(_profile(read_profile(args.file), args) if is_profile(args.file) else _plan(load_plan(args.file), args))
    return 0


def _plan(plan: Plan, args: argparse.Namespace) -> str:
    from planner.report.tables.plan import plan_report

    match args.format:
        case "json":
            return plan.model_dump_json(indent=1)
        case "table":
            return as_flags(plan_report(plan))
        case _:
            raise InputError(
                f"`format={args.format}` is for profiles, and '{args.file}' is a plan", hint="name a profile"
            )


def _profile(profile: Profile, args: argparse.Namespace) -> str:
    from planner.formats.pipedream import graph_txt
    from planner.report.svg.charts import profile_svg
    from planner.report.tables.profile import profile_report

    match args.format:
        case "json":
            return profile.model_dump_json(indent=1)
        case "svg":
            return profile_svg(profile)
        case "graph.txt":
            return graph_txt(profile).rstrip("\n")
        case _:
            return profile_report(profile, by=args.by, top=args.top)
