"""Minibatches and evaluation batches that a user's loop hands in, and their losses, known on every worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import InputError
from planner.executor.run.data import ENDLESS, BatchSource, EvaluationData
from planner.model.batch import Batch, make_batch
from planner.model.loss import Shares, shares_by_samples
from planner.schedule.instructions import Unit


class SharedLosses:
    """Sums the parts of each minibatch's loss over all workers, so that all know it.

    After every step, each worker adds what it has seen since the step before to an all-reduce. Under an asynchronous
    schedule nobody waits for it until `lag` steps later: the last stage is as many steps behind the first, and waiting
    for it would empty the pipeline.

    Args:
        lag: steps; 0 to know the losses of a step at its end.
        width: the most minibatches whose losses may be incomplete.
        parts_of: how many parts the loss of a minibatch has, over all workers.
    """

    def __init__(self, group: dist.ProcessGroup, lag: int, width: int, parts_of: Callable[[int], int]) -> None:
        self._group, self._lag, self._width, self._parts_of = group, lag, width, parts_of
        self._pending: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._sums: dict[int, tuple[float, float]] = {}  # loss so far, and parts that are missing
        self.known: dict[int, float] = {}  # by minibatch

    def exchange(self, count: int, parts: Sequence[tuple[int, float]]) -> None:
        """Add this worker's new parts, as pairs of a minibatch and a part of its loss; all workers call it together.

        Args:
            count: minibatches handed in so far.
            parts: those of the last `width` minibatches.
        """
        if count and count - 1 not in self.known:
            self._sums.setdefault(count - 1, (0.0, self._parts_of(count - 1)))
        sums = torch.zeros(self._width, 2, dtype=torch.float64)
        for minibatch, part in parts:
            sums[minibatch % self._width] += torch.tensor([part, 1.0], dtype=torch.float64)
        work = dist.all_reduce(sums, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((count, sums, work))
        while len(self._pending) > self._lag:
            self._merge()

    def settle(self) -> None:
        """Wait for all exchanges."""
        while self._pending:
            self._merge()

    @property
    def newest(self) -> float | None:
        """The loss of the newest minibatch that is known."""
        return self.known[max(self.known)] if self.known else None

    def _merge(self) -> None:
        count, sums, work = self._pending.popleft()
        work.wait()
        for minibatch in range(max(0, count - self._width), count):
            loss, parts = sums[minibatch % self._width].tolist()
            if parts:
                total, missing = self._sums.pop(minibatch)
                if parts == missing:
                    self.known[minibatch] = total + loss
                else:
                    self._sums[minibatch] = total + loss, missing - parts


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
        self._fed: dict[int, tuple[int, list[Batch], list[float]]] = {}  # samples, microbatches and their shares
        self.count = 0  # minibatches handed in, those before a checkpoint included

    def feed(self, batch: Batch) -> None:
        """Take the next minibatch."""
        parts = batch.split(min(self.microbatches, batch.size))
        self._fed[self.count] = batch.size, parts, self._shares_of(parts)
        self._fed.pop(self.count - self._kept, None)
        self.count += 1

    def batch(self, unit: Unit) -> Batch:
        return self._fed[unit.minibatch][1][unit.microbatch]

    def share(self, unit: Unit) -> float:
        return self._fed[unit.minibatch][2][unit.microbatch] if self.size(unit) else 0.0

    def parts_of(self, minibatch: int) -> int:
        """Count the parts of a minibatch's loss: its microbatches that have samples."""
        return len(self._fed[minibatch][1])

    def minibatch_size(self, minibatch: int) -> int:
        return self._fed[minibatch][0]

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return ENDLESS


class FedEvaluation(EvaluationData):
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
        self._batches, self.sizes = taken, [batch.size for batch in taken]

    def batch(self, unit: Unit) -> Batch:
        return self._batches[unit.minibatch]
