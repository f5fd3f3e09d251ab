"""Measure which share of a run's time `--replan` takes in the steady state, in one run.

    python -m benchmarks.replan_cost

Two workers train a small model over gloo. Within the same run, each adds up the time that its main
thread spends in what `--replan` adds, and the processor time of its thread that watches:

    share = (sampling + asking whether the plan ends + the thread that watches) / seconds of the run

The thread counts in full, because it may hold the interpreter. What the stopwatches take themselves
is measured beside each call, where caches are as cold, and does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

import planner
from benchmarks.testbed.replan.real import CASES, solved
from planner.formats.plan import Plan
from planner.options.training import DriftOptions

STEPS = 1500
WARM_UP = 100  # minibatches
CASE = CASES[1]  # two real workers, nothing emulated
# Appended to the model file, for its workers.
STOPWATCHES = """
import json
import threading

from planner.executor.observe.window_sampler import WindowSampler
from planner.executor.run.drift_watch import DriftWatch
from planner.executor.run.replan import Replanner

SPENT = {}

def timed(owner, name, part):
    original = getattr(owner, name)

    def measured(*args):
        began_s = time.perf_counter()
        result = original(*args)
        between_s = time.perf_counter()
        nothing(*args)
        ended_s = time.perf_counter()
        # What a stopwatch sees of a call that does nothing is not spent.
        spent_s = (between_s - began_s) - (ended_s - between_s)
        SPENT[part] = SPENT.get(part, 0.0) + spent_s
        return result

    setattr(owner, name, measured)

def nothing(*args):
    pass

def watched(self, *, run=DriftWatch._run):
    run(self)
    SPENT["watch_s"] = time.thread_time()

def finished(self, *, finish=DriftWatch.finish):
    SPENT["end_s"] = time.perf_counter()
    finish(self)
    text = json.dumps(SPENT)
    Path(__file__).with_name(f"spent-{os.environ['RANK']}.json").write_text(text)

def asked(self, minibatch, *, ends_at=Replanner.ends_at):
    if minibatch == WARM_UP:
        SPENT.clear()
        SPENT["first_s"] = time.perf_counter()
    began_s = time.perf_counter()
    ends = ends_at(self, minibatch)
    SPENT["ask_s"] = SPENT.get("ask_s", 0.0) + time.perf_counter() - began_s
    return ends

if "RANK" in os.environ:  # the process that starts the workers loads this file, too
    timed(WindowSampler, "records", "sample_s")
    timed(WindowSampler, "record", "sample_s")
    Replanner.ends_at = asked
    DriftWatch._run = watched
    DriftWatch.finish = finished
"""


@dataclass(frozen=True)
class Row:
    """What one worker spends of each minibatch, in seconds."""

    rank: int
    minibatch_s: float
    sample_s: float
    ask_s: float
    watch_s: float  # of the processor, from the start of the run on

    @property
    def share(self) -> float:
        """Share of the time of a minibatch."""
        return (self.sample_s + self.ask_s + self.watch_s) / self.minibatch_s


def measured(plan: Plan, folder: Path, steps: int, window: int) -> list[Row]:
    """Train, and return what each worker spent."""
    result = planner.train(
        folder / "model.py",
        plan,
        steps=steps,
        drift_window=window,
        profile=str(folder / "profile.json"),
        replan=True,
    )
    assert not result.moves, "the run moved, so it has not been steady: try again"
    rows = []
    for rank in range(plan.workers):
        spent = json.loads((folder / f"spent-{rank}.json").read_text("utf-8"))
        count = steps - WARM_UP
        rows.append(
            Row(
                rank=rank,
                minibatch_s=(spent["end_s"] - spent["first_s"]) / count,
                sample_s=spent["sample_s"] / count,
                ask_s=spent["ask_s"] / count,
                watch_s=spent["watch_s"] / steps,
            )
        )
    return rows


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--window", type=int, default=DriftOptions().drift_window)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["REPLAN_TIMES"] = str(folder / "times")  # the model file writes there
        plan = solved(CASE, folder)
        text = CASE.model.read_text("utf-8") + f"\nWARM_UP = {WARM_UP}\n" + STOPWATCHES
        # Its digest is that of the same layers, so the plan holds for it.
        (folder / "model.py").write_text(text, encoding="utf-8")
        rows = measured(plan, folder, arguments.steps, arguments.window)
    cells = [
        [
            row.rank,
            1e3 * row.minibatch_s,
            1e6 * row.sample_s,
            1e6 * row.ask_s,
            1e6 * row.watch_s,
            f"{row.share:.2%}",
        ]
        for row in rows
    ]
    headers = ("worker", "minibatch, ms", "sampling, us", "asking, us", "watching, us", "share")
    print(tabulate(cells, headers=headers, floatfmt=".1f", tablefmt="github"))


if __name__ == "__main__":
    main()
