"""`plan quickstart` and `plan selftest`: try the whole product on this machine, and check that it works here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import planner
from planner.cli.arguments import Verbs, add_folder_argument, declare
from planner.cli.output import print_answer, print_progress
from planner.cli.records import add_options, given_options
from planner.options.verbs import QuickstartOptions, SelftestOptions

if TYPE_CHECKING:
    from planner.selfcheck.run import Row

QUICKSTART = """\
Profile VGG-16 on this machine, find the best plan for its GPUs or cores, train it on scikit-learn's digits, train
it again with DistributedDataParallel, and compare. The model, the profile and the plan stay in a folder to continue
from.
"""
SELFTEST = """\
Check on this machine that what the other verbs promise holds: messages arrive, models cut at every layer compute what
they compute whole, workers train as one process does under every schedule, predicted memory is that measured, and a
killed worker is told with its cause. Run it first on a new machine, and put its table into a bug report.

    plan selftest                        # the CPU, or the GPUs where there are any
    plan selftest --only links,failures  # some of the checks

It takes some minutes, uses temporary files only, and needs no network. It is for one host: run it on each; `plan
profile --links` under torchrun measures the links between them. The exit code is 1 if a row fails.
"""

NEXT = """\
{folder} holds model.py, profile.json and plan.json. Next:
  cd {folder}
  plan show                                     # stages, predictions, bottleneck
  plan solve --gpus 8 --bandwidth 10Gbps        # the same model on another cluster
  plan solve --gpus 2 --bandwidth 1Gbps && plan train model.py --epochs 3"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verbs' arguments."""
    parser = declare(verbs, "quickstart", "try profile, solve and train on this machine", QUICKSTART, quickstart)
    add_folder_argument(parser, "folder to work in (default: %(default)s)", Path("quickstart"))
    add_options(parser, QuickstartOptions)
    parser = declare(verbs, "selftest", "check that planning and training work on this machine", SELFTEST, selftest)
    add_options(parser, SelftestOptions)


def quickstart(args: argparse.Namespace) -> int:
    """Profile, solve, train twice, and print the comparison."""
    from planner.profiler.this_machine import keep_freed_pages

    keep_freed_pages()  # as the workers do
    options = given_options(QuickstartOptions, args) | {"show_progress": sys.stderr.isatty()}
    print_answer(planner.quickstart(args.place, **options, on_phase=print_progress), args.json)
    if not args.json:
        print(f"\n{NEXT.format(folder=args.place)}")
    return 0


def selftest(args: argparse.Namespace) -> int:
    """Run the checks, and print a table of them."""
    from planner.profiler.this_machine import keep_freed_pages

    def show(row: Row) -> None:
        print_progress(f"{row.result:8}{row.check}: {row.name} ({row.seconds:.0f} s)")

    keep_freed_pages()  # as the workers do
    report = planner.selftest(**given_options(SelftestOptions, args), on_row=show)
    print_answer(report, args.json)
    return 0 if report.passed else 1
