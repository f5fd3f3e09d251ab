"""`plan quickstart`: the whole product on this machine in a few minutes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.arguments import Verbs, add_options, declare
from planner.cli.output import print_answer, print_progress
from planner.options.training import TrainArguments

if TYPE_CHECKING:
    from planner.demo.quickstart import QuickstartResult

DESCRIPTION = """\
Profile VGG-16 on this machine, find the best plan for its GPUs or cores, train it on scikit-learn's digits, train
it again with DistributedDataParallel, and compare. The model, the profile and the plan stay in a folder to continue
from.
"""
WORTH_SAYING = 0.05  # error of a prediction
NEXT = """\
{folder} holds model.py, profile.json and plan.json. Next:
  cd {folder}
  plan show                                     # stages, predictions, bottleneck
  plan solve --gpus 8 --bandwidth 10Gbps        # the same model on another cluster
  plan solve --gpus 2 --bandwidth 1Gbps && plan train model.py --epochs 3"""


def add_parser(verbs: Verbs) -> None:
    """Declare the verb's arguments."""
    parser = declare(verbs, "quickstart", "try profile, solve and train on this machine", DESCRIPTION, run)
    parser.add_argument(
        "-o",
        "--output",
        dest="place",
        type=Path,
        metavar="DIR",
        default=Path("quickstart"),
        help="folder to work in (default: %(default)s)",
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="workers (default: the GPUs of this machine, or its cores, at most 8)"
    )
    add_options(parser, TrainArguments, "device", told="GPUs where PyTorch sees any, else CPUs")
    add_options(parser, TrainArguments, "backend")
    parser.add_argument(
        "--steps", type=int, default=240, metavar="N", help="train N minibatches (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Profile, solve, train twice, and print the comparison."""
    from planner.demo.quickstart import Tour, quickstart
    from planner.errors import InputError
    from planner.profiler.this_machine import keep_freed_pages

    for option, value in (("gpus", args.gpus), ("steps", args.steps)):
        if value is not None and value < 1:
            raise InputError(f"`{option}={value}` is too few", hint=f"give `{option}` 1 or more")
    keep_freed_pages()  # as the workers do
    tour = Tour(args.place, args.steps, args.gpus, args.device, args.backend)
    result = quickstart(tour, show_progress=sys.stderr.isatty(), on_phase=print_progress)
    print_answer(result, args.json, quickstart_report)
    return 0


def quickstart_report(result: QuickstartResult) -> str:
    """Return the plan's run beside data parallelism's, and what to do next."""
    from tabulate import tabulate

    from planner.report.tables.runs import loss_ends, percent_error
    from planner.units import format_bandwidth

    rows, misses = [], ""
    for name, run, predicted in (
        ("plan", result.pipeline, result.pipeline.predicted_samples_per_s),
        ("DDP", result.data_parallel, result.predicted_data_parallel_samples_per_s),
    ):
        first, last = loss_ends(run.losses)
        shown = ["-", "-"]
        if predicted is not None and run.samples_per_s:
            shown = [f"{predicted:.1f} samples/s", percent_error(predicted, run.samples_per_s)]
            misses += miss_words(name, predicted / run.samples_per_s - 1, run.likely_cause)
        rows.append(
            [name, run.config, shown[0], f"{run.samples_per_s:.1f} samples/s", shown[1], f"{first:.3f} -> {last:.3f}"]
        )
    table = tabulate(rows, ["", "config", "predicted", "measured", "error", "loss"], disable_numparse=True)
    link = format_bandwidth(result.link_bytes_per_s)
    ours, theirs = result.pipeline.samples_per_s, result.data_parallel.samples_per_s
    times = f"{ours / theirs:.2f} times" if ours and theirs else "too few minibatches to say how many times"
    faster = f"The plan trains {times} as fast as DistributedDataParallel here, over a link of {link}.{misses}"
    return f"{table}\n\n{faster}\n\n{NEXT.format(folder=result.folder)}"


def miss_words(name: str, error: float, likely_cause: str | None) -> str:
    """Say that a prediction is off by more than runs of this length usually vary, and why; "" where it is not."""
    if abs(error) < WORTH_SAYING:
        return ""
    why = likely_cause or "runs this short vary by some percent; give `steps=1000` to see what is left"
    return f"\nThe prediction for {name} is {abs(error):.0%} too {'high' if error > 0 else 'low'}: {why}."
