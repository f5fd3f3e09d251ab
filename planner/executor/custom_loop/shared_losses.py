"""Losses of minibatches, known on every worker of a user's loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
        self._sums: dict[int, list[float]] = {}  # loss and number of parts
        self._missing: dict[int, int] = {}
        self.known: dict[int, float] = {}  # by minibatch

    def exchange(self, count: int, parts: Sequence[tuple[int, float]]) -> None:
        """Add this worker's new parts, as pairs of a minibatch and a part of its loss; all workers call it together.

        Args:
            count: minibatches handed in so far.
            parts: those of the last `width` minibatches.
        """
        if count and count - 1 not in self.known:
            self._missing.setdefault(count - 1, self._parts_of(count - 1))
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
                total = self._sums.setdefault(minibatch, [0.0, 0.0])
                total[0], total[1] = total[0] + loss, total[1] + parts
                if total[1] == self._missing[minibatch]:
                    self.known[minibatch] = total[0]
                    del self._sums[minibatch], self._missing[minibatch]
