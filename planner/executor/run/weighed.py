"""Minibatches whose microbatches count by something else than their samples, such as labels that are not padded."""

from __future__ import annotations

import threading

from planner.executor.run.data import BatchSource
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.loss_weight import Shares, shares_function
from planner.model.spec import TrainingSpec
from planner.schedule.instructions import Unit

KEPT = 3  # minibatches that a pipeline without weight stashing may have in flight, and one in the making


def weighed(source: BatchSource, mean: LossMean | None, spec: TrainingSpec, *, whole: bool = True) -> BatchSource:
    """Return the batches with the shares that the plan's loss asks for; as they are where these follow the samples."""
    shares = shares_function(mean, spec)
    return source if shares is None or source.microbatches == 1 else WeighedBatches(source, shares, whole=whole)


class WeighedBatches(BatchSource):
    """The batches of `source`, with shares of the loss that depend on what is in them.

    A worker that computes the loss reads whole minibatches, also where replicas of its stage divide them: what a
    microbatch counts depends on all others of its minibatch.

    Args:
        shares: of the parts of a minibatch.
    """

    def __init__(self, source: BatchSource, shares: Shares, *, whole: bool) -> None:
        super().__init__(source.microbatches)
        self.random, self.last_sizes = source.random, source.last_sizes
        self._source, self._shares, self._whole = source, shares, whole
        self._read: dict[int, tuple[list[Batch], list[float]]] = {}
        self._lock = threading.Lock()  # a thread reads ahead while the training thread asks for shares

    def batch(self, unit: Unit) -> Batch:
        batch = self._minibatch(unit.minibatch)[0][unit.microbatch] if self._whole else self._source.batch(unit)
        return batch.pinned() if self.pinned else batch

    def share(self, unit: Unit) -> float:
        return self._minibatch(unit.minibatch)[1][unit.microbatch] if self.size(unit) else 0.0

    def minibatch_size(self, minibatch: int) -> int:
        return self._source.minibatch_size(minibatch)

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return self._source.minibatches(steps, epochs)

    def _minibatch(self, number: int) -> tuple[list[Batch], list[float]]:
        """Return the microbatches of a minibatch that have samples, and their shares."""
        with self._lock:
            if number not in self._read:
                # Larger microbatches come first, so that empty ones are the last.
                units = [Unit(number, microbatch) for microbatch in range(self.microbatches)]
                parts = [self._source.batch(unit) for unit in units if self.size(unit)]
                while len(self._read) >= KEPT:
                    del self._read[min(self._read)]
                self._read[number] = parts, self._shares(parts)
            return self._read[number]
