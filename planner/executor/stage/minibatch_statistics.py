"""Update the running statistics of deferred BatchNorms once per minibatch, with the update of its weights.

Under 2bw forwards of the next minibatch begin before the update for this one, so statistics are put aside by then.
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from planner.model.stage.deferred_norm import DeferredNorm, RunningStatistics, Statistics, combine
from planner.model.stage.stage import StageModule


class MinibatchStatistics:
    """The statistics that one stage replica gathers; does nothing if the stage has no deferred BatchNorm."""

    def __init__(self, stage: StageModule, replicas: dist.ProcessGroup | None) -> None:
        self._stage = stage
        self._replicas = replicas
        self._norms = tuple(module for module in stage.children() if isinstance(module, DeferredNorm))
        self._current: int | None = None
        self._gathered: dict[int, Tensor] = {}  # by minibatch: `_packed` statistics

    def begin(self, minibatch: int) -> None:
        if self._norms and minibatch != self._current:
            self._put_aside()
            self._current = minibatch

    def commit(self, minibatch: int) -> None:
        """Update the running statistics with those of `minibatch`; all replicas of the stage call it."""
        if not self._norms:
            return
        if minibatch == self._current:
            self._put_aside()
        gathered = self._gathered.pop(minibatch, None)
        if gathered is None:  # all of its microbatches on this replica were empty
            gathered = torch.zeros_like(_packed(self._norms))
        rows = [gathered]
        if self._replicas is not None:
            # Statistics of two samples combine, but do not add. So all-reduce a table with a row per replica, zero in
            # the others' rows; then all replicas combine the rows in the same order, to the same bits.
            table = gathered.new_zeros(dist.get_world_size(self._replicas), gathered.numel())
            table[dist.get_rank(self._replicas)] = gathered
            dist.all_reduce(table, group=self._replicas)
            rows = list(table)
        sizes = [1 + 2 * norm.mean.numel() for norm in self._norms]
        with torch.no_grad():
            for norm, *parts in zip(self._norms, *(torch.split(row, sizes) for row in rows), strict=True):
                width = norm.mean.numel()
                split = [torch.split(part, [1, width, width]) for part in parts]
                found = reduce(combine, [(count[0], mean, deviations) for count, mean, deviations in split])
                self._update(norm.running, found)

    def _put_aside(self) -> None:
        if self._current is not None:
            self._gathered[self._current] = _packed(self._norms)
            self._current = None
            for norm in self._norms:
                norm.restart()

    def _update(self, running: RunningStatistics, minibatch: Statistics) -> None:
        values, mean, deviations = minibatch
        ran = values > 0  # false if the model skipped the layer in every microbatch
        counter = None if running.count is None else self._stage.get_buffer(running.count)
        if counter is not None:
            counter += ran
        momentum: float | Tensor | None = running.momentum
        if momentum is None:
            assert counter is not None
            momentum = 1 / counter.double().clamp(min=1)
        momentum = momentum * ran
        for name, new in ((running.mean, mean), (running.var, deviations / (values - 1))):
            buffer = self._stage.get_buffer(name)
            buffer.copy_(buffer.double() * (1 - momentum) + new * momentum)


def _packed(norms: Sequence[DeferredNorm]) -> Tensor:
    """Concatenate counts, means and deviations, as float64, which holds every count exactly."""
    return torch.cat([value.reshape(-1).double() for norm in norms for value in norm.statistics])
