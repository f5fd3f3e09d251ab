"""`plan quickstart` and `plan selftest`: try the whole product on this machine, and check that it works here."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments import Verbs, add_folder_argument, add_options, declare
from planner.cli.output import print_answer, print_progress
from planner.options.training import TrainArguments

if TYPE_CHECKING:
    from planner.demo.quickstart import QuickstartResult
    from planner.selfcheck.run import Row, SelftestReport

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
WORTH_SAYING = 0.05  # error of a prediction
FOUND_WIDTH = 96  # columns


def add_parser(verbs: Verbs) -> None:
    """Declare the verbs' arguments."""
    parser = declare(verbs, "quickstart", "try profile, solve and train on this machine", QUICKSTART, quickstart)
    add_folder_argument(parser, "folder to work in (default: %(default)s)", Path("quickstart"))
    help = "workers (default: the GPUs of this machine, or its cores, at most 8)"
    parser.add_argument("--gpus", type=int, metavar="N", help=help)
    add_options(parser, TrainArguments, "device", told="GPUs where PyTorch sees any, else CPUs")
    add_options(parser, TrainArguments, "backend")
    help = "train N minibatches (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=240, metavar="N", help=help)

    parser = declare(verbs, "selftest", "check that planning and training work on this machine", SELFTEST, selftest)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="what to check (default: cuda where there is a GPU)")
    help = "workers of the runs that have several. With fewer GPUs than workers they share the GPUs, over gloo "
    parser.add_argument("--workers", type=int, default=2, metavar="N", help=f"{help}(default: %(default)s)")
    help = "also cut this model after every layer: a model file, FILE:FUNCTION for another builder than build_model "
    parser.add_argument("--model", action="append", default=[], metavar="FILE", help=f"{help}(may be repeated)")
    for flag, verb in (("--only", "run"), ("--skip", "leave out")):
        help = f"{verb} these checks, by name, with commas between"
        parser.add_argument(flag, type=_names, default=(), metavar="CHECK", help=help)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def quickstart(args: argparse.Namespace) -> int:
    """Profile, solve, train twice, and print the comparison."""
    from planner.demo.quickstart import quickstart
    from planner.errors import InputError
    from planner.profiler.this_machine import keep_freed_pages

    for option, value in (("gpus", args.gpus), ("steps", args.steps)):
        if value is not None and value < 1:
            raise InputError(f"`{option}={value}` is too few", hint=f"give `{option}` 1 or more")
    keep_freed_pages()  # as the workers do
    given = args.place, args.steps, args.gpus, args.device, args.backend
    result = quickstart(*given, show_progress=sys.stderr.isatty(), on_phase=print_progress)
    print_answer(result, args.json, _quickstart_report)
    return 0


def _quickstart_report(result: QuickstartResult) -> str:
    """Return the plan's run beside data parallelism's, and what to do next."""
    from planner.reporting.tables.runs import loss_ends, percent_error
    from planner.reporting.tables.table import table_of
    from planner.units import as_fast, format_bandwidth

    rows, misses = [], ""
    for name, run, predicted in (
        ("plan", result.pipeline, result.pipeline.predicted_samples_per_s),
        ("DDP", result.data_parallel, result.predicted_data_parallel_samples_per_s),
    ):
        first, last, _ = loss_ends(run.losses)
        known = predicted is not None and run.samples_per_s > 0
        if predicted is not None and known:
            misses += miss_words(name, predicted / run.samples_per_s - 1, run.likely_cause)
        rows.append(
            {
                "": name,
                "config": run.config,
                "predicted": f"{predicted:.1f} samples/s" if known else "-",
                "measured": f"{run.samples_per_s:.1f} samples/s",
                "error": percent_error(predicted, run.samples_per_s) if predicted is not None else "-",
                "loss": f"{first:.3f} -> {last:.3f}",
            }
        )
    link = format_bandwidth(result.link_bytes_per_s)
    ours, theirs = result.pipeline.samples_per_s, result.data_parallel.samples_per_s
    times = as_fast(ours / theirs) if ours and theirs else "too few minibatches to say how many times as fast"
    faster = f"The plan trains {times} as DistributedDataParallel here, over a link of {link}.{misses}"
    return f"{table_of(rows).text()}\n\n{faster}\n\n{NEXT.format(folder=result.folder)}"


def miss_words(name: str, error: float, likely_cause: str | None) -> str:
    """Say that a prediction is off by more than runs of this length usually vary, and why; "" where it is not."""
    if abs(error) < WORTH_SAYING:
        return ""
    why = likely_cause or "runs this short vary by some percent; give `steps=1000` to see what is left"
    return f"\nThe prediction for {name} is {abs(error):.0%} too {'high' if error > 0 else 'low'}: {why}."


def selftest(args: argparse.Namespace) -> int:
    """Run the checks, and print a table of them."""
    from planner.profiler.this_machine import keep_freed_pages
    from planner.selfcheck.run import selftest

    def show(row: Row) -> None:
        print_progress(f"{row.result:8}{row.check}: {row.name} ({row.seconds:.0f} s)")

    keep_freed_pages()  # as the workers do
    report = selftest(args.device, args.workers, models=args.model, only=args.only, skip=args.skip, on_row=show)
    print_answer(report, args.json, selftest_report)
    return 0 if report.passed else 1


def selftest_report(report: SelftestReport) -> str:
    """Return the rows as a table, and their number by result."""
    from planner.reporting.tables.table import Table

    rows = [
        [row.check, row.name, row.result, textwrap.fill(row.found, FOUND_WIDTH), f"{row.seconds:.1f}"]
        for row in report.rows
    ]
    table = Table(["check", "case", "result", "found", "seconds"], rows, "llllr").text()
    counts = ", ".join(f"{report.count(result)} {result}" for result in ("passed", "failed", "skipped"))
    where = f"planner {report.version} on {report.device} with {report.workers} workers, {report.date}"
    return f"{table}\n\n{counts} in {report.seconds:.0f} s: {where}"
