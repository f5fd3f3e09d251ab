"""Run the first minibatches by the streams of a synchronous schedule, and all later ones by the plan's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.errors import InputError
from planner.executor.run.data import BatchSource
from planner.formats.plan import Plan
from planner.model.batch import Batch
from planner.options.training import TrainingOptions
from planner.plan.shape import shape_of, synchronous_minibatches, synchronous_part
from planner.schedule.instructions import Unit
from planner.schedule.schedule import PipelineShape
from planner.workers.job import Job, StartResult


@dataclass(frozen=True)
class SynchronousStart:
    """The first minibatches of a run, and the shape of their streams."""

    minibatches: int
    shape: PipelineShape

    def result(self, job: Job, samples: int, seconds: float) -> StartResult:
        """Return what was measured: so many samples in so many seconds, checkpoints included."""
        return StartResult(
            minibatches=self.minibatches,
            schedule=self.shape.schedule.name,
            microbatches=self.shape.microbatches,
            samples_per_s=samples / seconds,
            predicted_samples_per_s=job.predicted_start_samples_per_s,
        )


def check_synchronous_start(plan: Plan, options: TrainingOptions) -> None:
    """Check that a run of `plan` can begin with a synchronous start; raise InputError with what to do instead."""
    start = options.synchronous_start
    if not start:
        return
    if start > 1 and start != int(start):
        raise InputError(
            f"`synchronous_start={start}` is neither a share of the minibatches nor a number of them",
            hint="give a share from 0 to 1, as 0.2, or a whole number",
        )
    if not plan.schedule.asynchronous:
        raise InputError(
            f"`synchronous_start={start}` is for asynchronous schedules, and the plan's, {plan.schedule}, is "
            "synchronous from the first minibatch to the last",
            hint="leave `synchronous_start` out",
        )
    apart = {"accumulate": options.accumulate > 1, "scale_lr": options.scale_lr, "vertical_sync": plan.vertical_sync}
    for name in (name for name, given in apart.items() if given):
        raise InputError(
            f"`synchronous_start={start}` trains minibatches one by one at first, and with `{name}` an update later "
            "has others",
            hint=f"leave out `{name}` or `synchronous_start`",
        )


def start_of(job: Job, data: BatchSource, shape: PipelineShape) -> SynchronousStart | None:
    """Return the synchronous start that a job asks for; None where all minibatches are trained alike."""
    if not job.options.synchronous_start:
        return None
    return SynchronousStart(_length(job, data), replace(shape_of(synchronous_part(job.plan)), shared=shape.shared))


def with_start(job: Job, make: Callable[[Plan], BatchSource]) -> BatchSource:
    """Return the batches of a job; `make` makes those of a plan."""
    later = make(job.plan)
    if not job.options.synchronous_start:
        return later
    return DividedStart(make(synchronous_part(job.plan)), later, _length(job, later))


def _length(job: Job, data: BatchSource) -> int:
    """Return the minibatches of the start."""
    return synchronous_minibatches(job.options.synchronous_start, data.minibatches(job.steps, job.epochs))


class DividedStart(BatchSource):
    """The same minibatches, of which the first are divided as in `first`, and all others as in `later`."""

    def __init__(self, first: BatchSource, later: BatchSource, start: int) -> None:
        super().__init__(later.microbatches)
        self.random = later.random
        self.last_sizes = (*first.last_sizes, *later.last_sizes)
        self.start_sizes = tuple(first.size(Unit(0, number)) for number in range(first.microbatches))
        self._first, self._later, self._start = first, later, start

    def batch(self, unit: Unit) -> Batch:
        batch = self._of(unit.minibatch).batch(unit)
        return batch.pinned() if self.pinned else batch

    def minibatch_size(self, minibatch: int) -> int:
        return self._of(minibatch).minibatch_size(minibatch)

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return self._later.minibatches(steps, epochs)

    def size(self, unit: Unit) -> int:
        return self._of(unit.minibatch).size(unit)

    def share(self, unit: Unit) -> float:
        return self._of(unit.minibatch).share(unit)

    def _of(self, minibatch: int) -> BatchSource:
        return self._first if minibatch < self._start else self._later
