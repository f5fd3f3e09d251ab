"""Measure what a worker's host spends beyond its stage's operations. See README.md in this folder.

python -m benchmarks.speed.overhead --save
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
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
from benchmarks.speed.overhead.parts import NETWORK, OPERATIONS, Stopwatch, parts_timed
from benchmarks.speed.overhead.stand_in import build, lone_rank
from planner.executor.run.worker import PipelineWorker
from planner.model.spec import TrainingSpec
from planner.schedule.instructions import Instruction

README, MARKER = Path(__file__).with_name("README.md"), "<!-- result -->"
AIM_US = 100.0


@dataclass(frozen=True)
class Result:
    """Microseconds per microbatch: of each pair of windows the worker less its bare operations; and
    the parts.
    """

    case: Case
    bare_us: float
    pairs_us: list[float]
    parts_us: dict[str, float]

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
    """Run the worker of `case` and its bare operations in turn, and then once more with every part
    timed.
    """
    plan, spec = plan_of(case), TrainingSpec.from_file(MODEL)
    per_window = units // case.microbatches
    with lone_rank(case.stage, WORKERS):
        context, worker, neighbours, stream = build(plan, spec, per_window * (2 * pairs + 3))
        two, one = (sum(1 for _ in context.stream(0, windows * per_window)) for windows in (2, 1))

        def work(run: Callable[[Iterable[Instruction]], object] = worker.run) -> float:
            neighbours.spent_s, began_s = 0.0, time.thread_time()
            run(islice(stream, two - one))
            return time.thread_time() - began_s - neighbours.spent_s

        with neighbours.reached():
            work()
            # Of another copy: the worker has units in flight, whose weights must not change.
            copy, *_ = build(plan, spec, 1)
            unit, update = (
                bare_unit(copy, copy.stages[case.stage]),
                bare_update(copy.stages[case.stage]),
            )

            def bare() -> float:
                began_s = time.thread_time()
                for _ in range(per_window):
                    for _ in range(case.microbatches):
                        unit()
                    update()
                return time.thread_time() - began_s

            bare()
            scale = 1e6 / (per_window * case.microbatches)
            found, bares = [], []
            for index in range(pairs):
                # In the order A B, B A, A B, ..., so that a drift of the machine cancels.
                order = (work, bare) if index % 2 == 0 else (bare, work)
                seconds = {each: each() for each in order}
                found.append((seconds[work] - seconds[bare]) * scale)
                bares.append(seconds[bare] * scale)
            told = []
            for _ in range(pairs):
                with parts_timed(context.stages[case.stage].module) as watch:
                    work(partial(_run_timed, worker, watch))
                told.append(watch.microseconds(per_window * case.microbatches))
    parts_us = {part: statistics.median(window[part] for window in told) for part in told[0]}
    return Result(case, statistics.median(bares), found, parts_us)


def _run_timed(
    worker: PipelineWorker, watch: Stopwatch, instructions: Iterable[Instruction]
) -> None:
    worker.run(watch.items("instruction stream", instructions))


def table(results: list[Result]) -> str:
    """Return a row per part, in microseconds per microbatch."""
    found = dict.fromkeys(
        part for result in results for part in result.parts_us if part not in (OPERATIONS, NETWORK)
    )
    parts = sorted(found, key=lambda part: -results[0].parts_us.get(part, 0))
    rows = [
        [part, *(f"{result.parts_us.get(part, 0):.1f}" for result in results)] for part in parts
    ]
    sums = [sum(result.parts_us.get(part, 0) for part in parts) for result in results]
    rows.append(
        [
            "other",
            *(
                f"{result.total_us - known:.1f}"
                for result, known in zip(results, sums, strict=True)
            ),
        ]
    )
    rows.append(["**in all**", *(f"**{result.total_us:.1f}**" for result in results)])
    rows.append(["quartiles", *(_quartiles(result.pairs_us) for result in results)])
    rows.append(["the stage's operations", *(f"{result.bare_us:.1f}" for result in results)])
    columns = ("left", *("right",) * len(results))
    headers = ("\u00b5s per microbatch", *(result.case.name for result in results))
    return tabulate(rows, headers, tablefmt="github", colalign=columns, disable_numparse=True)


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
