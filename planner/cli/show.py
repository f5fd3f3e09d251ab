"""`plan show`: a plan or a profile, as tables."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Show what is in a plan, or in a profile: the files that the other verbs write, or a graph.txt that PipeDream published.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb's arguments."""
    parser = subparsers.add_parser(
        "show",
        help="show a plan or a profile as tables",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=Path("plan.json"), help="plan or profile (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the file's content."""
    from planner.pipedream import is_profile, read_profile
    from planner.plan_file import load_plan
    from planner.report.plan import plan_report
    from planner.report.profile import profile_report

    if is_profile(args.file):
        profile = read_profile(args.file)
        print(profile.model_dump_json(indent=1) if args.json else profile_report(profile))
        return 0
    plan = load_plan(args.file)
    print(plan.model_dump_json(indent=1) if args.json else plan_report(plan))
    return 0
