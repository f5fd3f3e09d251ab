"""Measure the throughput of a run in steady state, while it runs and afterwards.

What a worker notes while it runs: losses and times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.workers.job import Evaluation


class Completion(NamedTuple):
    """The end of a backward, and how long the worker had computed until then."""

    ended_s: float
    busy_s: float


@dataclass
class WorkerLog:
    """Losses and times that a worker saw. Only differences of times have a meaning."""

    losses: list[tuple[int, float]] = field(default_factory=list)  # minibatch, its (part of the) loss
    completions: deque[Completion] = field(default_factory=lambda: deque(maxlen=100_000))
    busy_s: float = 0.0
    paused_s: float = 0.0  # spent on what is no training


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as its last stage sees it."""

    minibatch: int
    minibatches: int
    loss: float
    samples_per_s: float | None
    seconds_left: float | None
    evaluation: Evaluation | None = None  # if one has just ended


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class SteadyState:
    """What a worker did between warm-up and drain."""

    units_per_s: float
    busy_share: float


def steady_state(completions: Sequence[Completion], start_up: int, drain: int, per_round: int) -> SteadyState:
    """Return throughput and busy share in the middle of a run.

    Args:
        completions: of all backwards, in order.
        start_up: units at the start that do not count.
        drain: units at the end that do not count.
        per_round: backwards between two updates; the window holds whole rounds, because they come in bursts.
    """
    if per_round == 0 or len(completions) < 2 * per_round + 1:
        return SteadyState(0.0, 0.0)
    # A short run is measured as a whole rather than not at all.
    if len(completions) < start_up + drain + 4 * per_round:
        start_up, drain = per_round, 0
    first = max(per_round, -(-start_up // per_round) * per_round) - 1
    rounds = (len(completions) - drain - 1 - first) // per_round
    begin, end = completions[first], completions[first + rounds * per_round]
    elapsed = end.ended_s - begin.ended_s
    return SteadyState(rounds * per_round / elapsed, (end.busy_s - begin.busy_s) / elapsed)


def progress_reporter(
    on_progress: ProgressCallback, minibatches: int, minibatches_per_update: int, minibatch_size: int
) -> Callable[[WorkerLog], None]:
    """Return a callback for `Worker` that reports after each update, with the throughput over the last 20 updates."""
    recent: deque[float] = deque(maxlen=20)

    def report(log: WorkerLog) -> None:
        recent.append(time.perf_counter())
        # The other replicas have done their minibatches of the round by about now, too.
        newest = log.losses[-1][0] if log.losses else 0
        done = min(minibatches, newest + minibatches_per_update)
        rate = None
        if len(recent) > 1:
            rate = (len(recent) - 1) * minibatches_per_update / (recent[-1] - recent[0])
        on_progress(
            Progress(
                minibatch=done,
                minibatches=minibatches,
                loss=latest_loss(log),
                samples_per_s=None if rate is None else rate * minibatch_size,
                seconds_left=None if rate is None else (minibatches - done) / rate,
            )
        )

    return report


def evaluated(evaluation: Evaluation, log: WorkerLog, minibatches: int) -> Progress:
    """Return the progress to report after an evaluation."""
    return Progress(evaluation.minibatch, minibatches, latest_loss(log), None, None, evaluation)


def latest_loss(log: WorkerLog) -> float:
    """Return the loss of the newest minibatch in `log`: the sum of the parts that this worker has seen."""
    newest = log.losses[-1][0] if log.losses else -1
    total = 0.0
    for minibatch, part in reversed(log.losses):
        if minibatch != newest:
            break
        total += part
    return total
