"""Rates in steady state, while a run goes on and after it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.executor.job import Evaluation
from planner.executor.run.worker import Completion, WorkerLog


@dataclass(frozen=True)
class Progress:
    """How far a run is, as its last stage sees it."""

    minibatch: int
    minibatches: int
    loss: float
    samples_per_s: float | None
    seconds_left: float | None
    evaluation: Evaluation | None = None  # when there was one just now


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class SteadyState:
    """What a worker did between start-up and drain."""

    units_per_s: float
    busy_share: float


def steady_state(completions: Sequence[Completion], start_up: int, drain: int, per_round: int) -> SteadyState:
    """Rate and busy share of the middle of a run.

    Args:
        completions: all backwards, in order.
        start_up: units at the start that do not count.
        drain: units at the end that do not count.
        per_round: backwards between two updates; the window holds whole rounds, because they come in bursts.
    """
    if per_round == 0 or len(completions) < 2 * per_round + 1:
        return SteadyState(0.0, 0.0)
    # A short run is measured whole rather than not at all.
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
    """A callback for `Worker` that reports after each update, with the rate over the last updates."""
    recent: deque[float] = deque(maxlen=20)

    def report(log: WorkerLog) -> None:
        recent.append(time.perf_counter())
        # The other replicas are as far: those that follow this one in the round.
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
    """What is reported of an evaluation."""
    return Progress(evaluation.minibatch, minibatches, latest_loss(log), None, None, evaluation)


def latest_loss(log: WorkerLog) -> float:
    """Loss of the newest minibatch in `log`, as far as this worker saw it: its parts add up."""
    newest = log.losses[-1][0] if log.losses else -1
    total = 0.0
    for minibatch, part in reversed(log.losses):
        if minibatch != newest:
            break
        total += part
    return total
