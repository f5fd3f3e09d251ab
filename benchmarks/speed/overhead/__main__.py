"""Measure what a worker's host spends beyond its stage's operations. See README.md in this folder.

python -m benchmarks.speed.overhead --save
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.speed.overhead.cases import (
    CASES,
    MODEL,
    WORKERS,
    Case,
    bare_unit,
    bare_update,
    plan_of,
)
from benchmarks.speed.overhead.stand_in import build, lone_rank
from planner.model.spec import TrainingSpec

README, MARKER = Path(__file__).with_name("README.md"), "<!-- result -->"
AIM_US = 100.0


@dataclass(frozen=True)
class Result:
    """Microseconds per microbatch: of each pair of windows the worker less its bare operations."""

    case: Case
    bare_us: float
    pairs_us: list[float]

    @property
    def total_us(self) -> float:
        """Median over the pairs."""
        return statistics.median(self.pairs_us)


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=40, help="windows of the worker, each beside one without it"
    )
    parser.add_argument("--units", type=int, default=64, help="microbatches per window")
    parser.add_argument("--save", action="store_true", help="write the table into the README")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(case, arguments.pairs, arguments.units) for case in CASES]
    text = f"{_described()}\n\n{table(results)}"
    print(text)
    if arguments.save:
        head = README.read_text(encoding="utf-8").split(MARKER)[0]
        README.write_text(f"{head}{MARKER}\n\n{text}\n", encoding="utf-8")


def measure(case: Case, pairs: int, units: int) -> Result:
    """Run the worker of `case` and its bare operations in turn."""
    plan = plan_of(case)
    spec = TrainingSpec.from_file(MODEL)
    minibatches = units // case.microbatches  # of a window
    scale = 1e6 / (minibatches * case.microbatches)

    with lone_rank(case.stage, WORKERS):
        context, worker, neighbours, stream = build(plan, spec, minibatches * (pairs + 3))
        two, one = (sum(1 for _ in context.stream(0, windows * minibatches)) for windows in (2, 1))

        def work() -> float:
            neighbours.spent_s = 0.0
            began_s = time.thread_time()
            worker.run(islice(stream, two - one))
            return time.thread_time() - began_s - neighbours.spent_s

        with neighbours.reached():
            work()
            # Of another copy: the worker has units in flight, whose weights must not change.
            copy, *_ = build(plan, spec, 1)
            unit = bare_unit(copy, copy.stages[case.stage])
            update = bare_update(copy.stages[case.stage])

            def bare() -> float:
                began_s = time.thread_time()
                for _ in range(minibatches):
                    for _ in range(case.microbatches):
                        unit()
                    update()
                return time.thread_time() - began_s

            bare()
            overheads_us = []
            bares_us = []
            for index in range(pairs):
                # In the order A B, B A, A B, ..., so that a drift of the machine cancels.
                order = (work, bare) if index % 2 == 0 else (bare, work)
                seconds = {each: each() for each in order}
                overheads_us.append((seconds[work] - seconds[bare]) * scale)
                bares_us.append(seconds[bare] * scale)

    return Result(case, statistics.median(bares_us), overheads_us)


def table(results: list[Result]) -> str:
    """Return a row per case, in microseconds per microbatch."""
    rows = [
        (
            result.case.name,
            f"{result.total_us:.1f}",
            _quartiles(result.pairs_us),
            f"{result.bare_us:.1f}",
        )
        for result in results
    ]
    headers = ("\u00b5s per microbatch", "overhead", "quartiles", "the stage's operations")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.1f} to {high:.1f}"


def _described() -> str:
    return (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {platform.system()} "
        f"{platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, load "
        f"{os.getloadavg()[0]:.1f} before."
    )


if __name__ == "__main__":
    main()
