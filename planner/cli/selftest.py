"""`plan selftest`: check on this machine that planning and training work."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from planner.cli.arguments import Verbs, declare
from planner.cli.output import print_answer, print_progress

if TYPE_CHECKING:
    from planner.selftest.run import Row, SelftestReport

DESCRIPTION = """\
Check on this machine that what the other verbs promise holds: messages arrive, models cut at every layer compute what
they compute whole, workers train as one process does under every schedule, predicted memory is that measured, and a
killed worker is told with its cause. Run it first on a new machine, and put its table into a bug report.

    plan selftest                        # the CPU, or the GPUs where there are any
    plan selftest --only links,failures  # some of the checks

It takes some minutes, uses temporary files only, and needs no network. It is for one host: run it on each; `plan
profile --links` under torchrun measures the links between them. The exit code is 1 if a row fails.
"""

FOUND_WIDTH = 96  # columns


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "selftest", "check that planning and training work on this machine", DESCRIPTION, run)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="what to check (default: cuda where there is a GPU)")
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="workers of the runs that have several. With fewer GPUs than workers they share the GPUs, over gloo "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="FILE",
        help="also cut this model after every layer: a model file, FILE:FUNCTION for another builder than build_model "
        "(may be repeated)",
    )
    for argument, verb in (("--only", "run"), ("--skip", "leave out")):
        parser.add_argument(
            argument,
            type=_names,
            default=(),
            metavar="CHECK",
            help=f"{verb} these checks, by name, with commas between",
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(args: argparse.Namespace) -> int:
    """Run the checks, and print a table of them."""
    from planner.profiler.this_machine import keep_freed_pages
    from planner.selftest.run import selftest

    keep_freed_pages()  # as the workers do
    report = selftest(args.device, args.workers, models=args.model, only=args.only, skip=args.skip, on_row=_show)
    print_answer(report, args.json, selftest_report)
    return 0 if report.passed else 1


def selftest_report(report: SelftestReport) -> str:
    """Return the rows as a table, and their number by result."""
    from planner.report.tables.table import Table

    rows = [
        [row.check, row.name, row.result, textwrap.fill(row.found, FOUND_WIDTH), f"{row.seconds:.1f}"]
        for row in report.rows
    ]
    table = Table(["check", "case", "result", "found", "seconds"], rows, "llllr").text()
    counts = ", ".join(f"{report.count(result)} {result}" for result in ("passed", "failed", "skipped"))
    where = f"planner {report.version} on {report.device} with {report.workers} workers, {report.date}"
    return f"{table}\n\n{counts} in {report.seconds:.0f} s: {where}"


def _show(row: Row) -> None:
    print_progress(f"{row.result:8}{row.check}: {row.name} ({row.seconds:.0f} s)")
