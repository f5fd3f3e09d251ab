"""What it costs a worker to watch whether its run keeps to the plan, in processor time.

    python -m benchmarks.drift_cost

The worker of a middle stage under 1f1b-flush goes through its instructions without doing them, once
with the sampler and once without. Measured apart are the thread beside it, which tells worker 0,
and worker 0's thread, which compares a window of so many workers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from planner.executor.observe.window_sampler import WINDOW, WindowNotes, WindowSampler
from planner.executor.run.drift_watch import Told
from planner.formats.timeline import Event
from planner.runtime import HostEvent
from planner.schedule.instructions import Instruction
from planner.schedule.one_stage import FLUSH
from planner.schedule.schedule import Channel, PipelineShape, stream
from planner.simulator.drift import LOOKS, DriftJudge, Expectation, Window

_MINIBATCHES = 40 * WINDOW
HALF = WINDOW // LOOKS


def instructions(microbatches: int) -> list[Instruction]:
    """Return the stream of the middle one of three stages."""
    shape = PipelineShape(
        ((0,), (1,), (2,)), (Channel(0, 1), Channel(1, 2)), FLUSH, microbatches=microbatches
    )
    return list(stream(shape, 1, 1, _MINIBATCHES))


def _mark() -> HostEvent:
    mark = HostEvent()
    mark.record()
    return mark


def run(given: Sequence[Instruction], sampler: WindowSampler | None) -> float:
    """Return processor seconds per minibatch of going through the instructions."""
    began_s = time.thread_time()
    for instruction in given:
        sampled = sampler is not None and sampler.records(instruction)
        start = _mark() if sampled else None
        if start is not None and sampler is not None:
            sampler.record(instruction, start, _mark())
    return (time.thread_time() - began_s) / _MINIBATCHES


def per_minibatch_s(
    action: Callable[[WindowNotes], object], windows: Sequence[WindowNotes]
) -> float:
    """Return processor seconds per minibatch of doing something with each window."""
    began_s = time.thread_time()
    for window in windows:
        action(window)
    return (time.thread_time() - began_s) / sum(each.end - each.first for each in windows)


def told(window: WindowNotes) -> str:
    """Return what a worker writes to the store."""
    return Told.of(window).model_dump_json()


def judged(judge: DriftJudge, texts: Sequence[str]) -> float:
    """Return worker 0's processor seconds per minibatch for a window that so many workers told."""
    began_s = time.thread_time()
    events: list[Event] = []
    for text in texts:
        events += Told.model_validate_json(text).events
    judge.look(Window(0, HALF, events, 1.0))
    return (time.thread_time() - began_s) / HALF


def main() -> None:
    """Print the costs for some numbers of microbatches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    unknown = Expectation(1.0, {}, {}, {}, {}, by_sums=False)
    for microbatches in arguments.microbatches:
        given = instructions(microbatches)
        windows: list[WindowNotes] = []
        alone_s = min(run(given, None) for _ in range(3))
        watched_s = min(
            run(given, WindowSampler(1, torch.device("cpu"), 1, windows.append, HALF))
            for _ in range(3)
        )
        thread_s = per_minibatch_s(told, windows)
        judging_s = judged(DriftJudge(unknown), [told(windows[0])] * arguments.workers)
        print(
            f"{microbatches:3} microbatches: {1e6 * (watched_s - alone_s):6.1f} us in the worker, "
            f"{1e6 * thread_s:6.1f} us in its thread, {1e6 * judging_s:6.1f} us in worker 0's for "
            f"{arguments.workers} workers"
        )


if __name__ == "__main__":
    main()
