"""Measure the throughput of a run, and report its progress: to a callback and the user's hook."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from planner.executor.observe.untouched import TrainedState
from planner.model.spec import TrainingSpec
from planner.workers.job import Evaluation


def hook(spec: TrainingSpec, trained: TrainedState | None = None) -> "ProgressCallback | None":
    """Return a callback for the model file's on_update(minibatch, loss, metrics), if it has one.

    Args:
        trained: what on_update() may not change, where other workers have parts of it that would
            stay as they are.
    """
    if not spec.defines("on_update"):
        return None

    def call(progress: Progress) -> None:
        with nullcontext() if trained is None else trained.unchanged():
            spec.on_update(progress.minibatch, progress.loss, progress.metrics)

    return call


class Completion(NamedTuple):
    """The end of a backward, and how long the worker had computed until then."""

    ended_s: float
    busy_s: float


@dataclass
class WorkerLog:
    """Losses and times that a worker saw. Only differences of times have a meaning."""

    # minibatch, its (part of the) loss
    losses: list[tuple[int, float]] = field(default_factory=list)
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

    @property
    def metrics(self) -> dict[str, float | None]:
        """Loss and metrics of the evaluation that has just ended; none after an update."""
        return (
            {}
            if self.evaluation is None
            else {"loss": self.evaluation.loss, **self.evaluation.metrics}
        )


ProgressCallback = Callable[[Progress], None]


class SteadyState(NamedTuple):
    """What a worker did between warm-up and drain."""

    units_per_s: float
    busy_share: float


def steady_state(
    completions: Sequence[Completion], start_up: int, drain: int, per_round: int
) -> SteadyState:
    """Return throughput and busy share in a run without the units of its `start_up` and `drain`.

    The window holds whole rounds, of `per_round` backwards between two updates, because these come
    in bursts.
    """
    if per_round == 0 or len(completions) < 2 * per_round + 1:
        return SteadyState(0.0, 0.0)
    # A short run is measured as a whole rather than not at all.
    if len(completions) < start_up + drain + 4 * per_round:
        start_up = per_round
        drain = 0

    first = max(per_round, -(-start_up // per_round) * per_round) - 1
    rounds = (len(completions) - drain - 1 - first) // per_round
    begin = completions[first]
    end = completions[first + rounds * per_round]
    elapsed = end.ended_s - begin.ended_s
    return SteadyState(rounds * per_round / elapsed, (end.busy_s - begin.busy_s) / elapsed)


class Reporter:
    """Tells callbacks of a run's progress, with the throughput over the last 20 updates."""

    def __init__(
        self,
        callbacks: Sequence[ProgressCallback],
        minibatches: int,
        minibatches_per_update: int,
        minibatch_size: int,
    ) -> None:
        self._callbacks = callbacks
        self._minibatches = minibatches
        self._per_update = minibatches_per_update
        self._size = minibatch_size
        self._recent: deque[float] = deque(maxlen=20)

    def updated(self, log: WorkerLog) -> None:
        """Note an update, and show the pace."""
        self._recent.append(time.perf_counter())
        # The other replicas have done their minibatches of the round by about now, too.
        newest = log.losses[-1][0] if log.losses else 0
        done = min(self._minibatches, newest + self._per_update)
        loss = latest_loss(log)
        if len(self._recent) < 2:
            self._tell(Progress(done, self._minibatches, loss, None, None))
            return

        minibatches = (len(self._recent) - 1) * self._per_update
        per_s = minibatches / (self._recent[-1] - self._recent[0])
        left_s = (self._minibatches - done) / per_s
        self._tell(Progress(done, self._minibatches, loss, per_s * self._size, left_s))

    def evaluated(self, evaluation: Evaluation, log: WorkerLog) -> None:
        """Show an evaluation."""
        self._tell(
            Progress(
                evaluation.minibatch, self._minibatches, latest_loss(log), None, None, evaluation
            )
        )

    def _tell(self, progress: Progress) -> None:
        for callback in self._callbacks:
            callback(progress)


def latest_loss(log: WorkerLog) -> float:
    """Return the loss of the newest minibatch in `log`: the sum of the parts that this worker has
    seen.
    """
    newest = log.losses[-1][0] if log.losses else -1
    return sum(
        part for _, part in takewhile(lambda entry: entry[0] == newest, reversed(log.losses))
    )
