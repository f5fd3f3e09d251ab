"""Minibatches and evaluation batches that a user's loop hands in."""

from __future__ import annotations

from collections.abc import Iterable

from planner.errors import InputError
from planner.executor.run.data import BatchSource
from planner.model.batch import Batch, make_batch
from planner.model.loss_weight import Shares, shares_by_samples
from planner.schedule.instructions import Unit

ENDLESS = 2**40  # minibatches of a stream whose end is not known


class FedBatches(BatchSource):
    """Minibatches that were handed in, kept as long as a stage may need them.

    Args:
        kept: minibatches back to the oldest one that may be in flight.
        shares: of a minibatch's microbatches; None where they are those of their samples.
    """

    def __init__(self, microbatches: int, kept: int, shares: Shares | None = None) -> None:
        super().__init__(microbatches)
        self._kept = kept
        self._shares_of = shares or shares_by_samples
        self._parts: dict[int, list[Batch]] = {}
        self._sizes: dict[int, int] = {}
        self._shares: dict[int, list[float]] = {}
        self.count = 0  # minibatches handed in, those before a checkpoint included

    def feed(self, batch: Batch) -> None:
        """Take the next minibatch."""
        self._parts[self.count] = batch.split(min(self.microbatches, batch.size))
        self._sizes[self.count] = batch.size
        self._shares[self.count] = self._shares_of(self._parts[self.count])
        self.count += 1
        for kept in (self._parts, self._sizes, self._shares):
            kept.pop(self.count - 1 - self._kept, None)

    def batch(self, unit: Unit) -> Batch:
        return self._parts[unit.minibatch][unit.microbatch]

    def share(self, unit: Unit) -> float:
        return self._shares[unit.minibatch][unit.microbatch] if self.size(unit) else 0.0

    def parts_of(self, minibatch: int) -> int:
        """Count the parts of a minibatch's loss: its microbatches that have samples."""
        return len(self._parts[minibatch])

    def minibatch_size(self, minibatch: int) -> int:
        return self._sizes[minibatch]

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return ENDLESS


class FedEvaluation:
    """The batches of one evaluation."""

    def __init__(self, size: int, *, fixed: bool) -> None:
        self._size, self._fixed = size, fixed
        self._batches: list[Batch] = []

    def feed(self, batches: Iterable[object]) -> None:
        """Take the batches of the next evaluation.

        Raises:
            InputError: for no batches, or a batch of a size that the stages do not take.
        """
        taken = [make_batch(batch, "a batch given to evaluate()") for batch in batches]
        if not taken:
            raise InputError("evaluate() was given no batches", hint="give an iterable of batches")
        for batch in taken:
            if batch.size > self._size or (self._fixed and batch.size < self._size):
                most = "exactly" if self._fixed else "at most"
                raise InputError(
                    f"a batch of {batch.size} samples was given to evaluate(), and stages take {most} {self._size}",
                    hint="make the batches of the evaluation as large as the plan's microbatches",
                )
        self._batches = taken

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self._batches)

    @property
    def samples(self) -> int:
        """Samples of all batches."""
        return sum(batch.size for batch in self._batches)

    def size(self, unit: Unit) -> int:
        """Return the number of samples of batch `unit.minibatch`."""
        return self._batches[unit.minibatch].size

    def batch(self, unit: Unit) -> Batch:
        """Return batch `unit.minibatch`."""
        return self._batches[unit.minibatch]
