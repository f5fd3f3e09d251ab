"""Measure the throughput of a run, and report its progress: to a callback, the user's hook and TensorBoard."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from planner.errors import InputError
from planner.model.spec import TrainingSpec
from planner.workers.job import Evaluation

EVERY_MINIBATCHES = 10  # between two losses in TensorBoard


def hook(spec: TrainingSpec) -> ProgressCallback | None:
    """Return a callback for the model file's on_update(minibatch, loss, metrics), if it has one."""
    if not spec.defines("on_update"):
        return None

    def call(progress: Progress) -> None:
        spec.on_update(progress.minibatch, progress.loss, progress.metrics)

    return call


def tensorboard(folder: str, first: int = 0) -> ProgressCallback:
    """Return a callback that writes losses, throughput and evaluations for TensorBoard.

    Args:
        first: minibatch that the run resumes from; what the folder has of later minibatches is no longer shown.

    Raises:
        InputError: when TensorBoard is not installed.
    """
    writer = check_tensorboard()(folder, purge_step=first + 1 if first else None)
    newest = -EVERY_MINIBATCHES

    def write(progress: Progress) -> None:
        nonlocal newest
        if progress.evaluation is not None:
            for name, value in progress.metrics.items():
                if value is not None:
                    writer.add_scalar(f"evaluation/{name}", value, progress.minibatch)
            writer.flush()
        elif progress.minibatch >= newest + EVERY_MINIBATCHES or progress.minibatch == progress.minibatches:
            newest = progress.minibatch
            writer.add_scalar("training/loss", progress.loss, progress.minibatch)
            if progress.samples_per_s is not None:
                writer.add_scalar("training/samples_per_s", progress.samples_per_s, progress.minibatch)
            if progress.minibatch == progress.minibatches:
                writer.flush()

    return write


def all_of(*callbacks: ProgressCallback | None) -> ProgressCallback | None:
    """Return one callback that calls all of `callbacks`; None if there are none."""
    found = [callback for callback in callbacks if callback is not None]
    if not found:
        return None

    def call(progress: Progress) -> None:
        for callback in found:
            callback(progress)

    return call


def check_tensorboard() -> Callable[..., Any]:
    """Return TensorBoard's writer class; raise InputError when it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "`tensorboard` needs the package tensorboard, which is not installed", hint="pip install tensorboard"
        ) from None
    writer: Callable[..., Any] = SummaryWriter
    return writer


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

    @property
    def metrics(self) -> dict[str, float | None]:
        """Loss and metrics of the evaluation that has just ended; none after an update."""
        return {} if self.evaluation is None else {"loss": self.evaluation.loss, **self.evaluation.metrics}


ProgressCallback = Callable[[Progress], None]


class SteadyState(NamedTuple):
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
    return sum(part for _, part in takewhile(lambda entry: entry[0] == newest, reversed(log.losses)))
