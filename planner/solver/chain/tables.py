"""Tabulate how many replicas all stages of a small model need, instead of many short computations over arrays.

The fewest replicas with which a stage meets a target depend on the GPUs after it only if memory is limited, or under
2bw, and even then those seldom matter. So the table has one entry per first and last state of a stage, for one target
at a time. An entry is computed again only if its replicas are too few for the GPUs after the stage.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.work import IMPOSSIBLE, Footprint, Integers
from planner.solver.bounds.bounds import Bounds
from planner.solver.chain.states import StateSpace
from planner.solver.chain.ways import WaysOf
from planner.solver.problem import Limits


class StageTables:
    """Replicas of all stages between the states of `space`."""

    def __init__(self, space: StateSpace, model: Bounds, limits: Limits, ways: WaysOf) -> None:
        self._space, self._model, self._ways = space, model, ways
        self._gpus, self._memory_bytes = limits.gpus, limits.memory_bytes
        self._last: tuple[float, Integers] | None = None  # the last target, and its table

    def fewest_alone(self, target_s: float) -> Integers:
        """Return the fewest replicas that meet the target with no GPUs after them, by first and last state."""
        if self._last is None or self._last[0] != target_s:
            firsts, others, work = self._space.every_stage
            table = np.full((len(self._space),) * 2, IMPOSSIBLE, dtype=np.int64)
            table[firsts, others] = self._model.fewest_replicas(self._ways.plainest_work(work), target_s)
            self._last = target_s, table
        return self._last[1]

    def fewest(self, state: int, others: Integers, target_s: float, after: Integers, held: ArrayLike) -> Integers:
        """Return the fewest replicas of the stages from `state` to `others` that meet the target, and at least `held`.

        `after`: GPUs after each stage. Where a stage needs more GPUs than there are, the answer is a lower bound.
        """
        alone: Integers = self.fewest_alone(target_s)[state, others]
        replicas = np.maximum(alone, held)
        enough = replicas == alone
        if self._model.counts_gpus_after:
            enough &= self._model.enough_before(replicas, after)
        few = ~enough & (replicas + after <= self._gpus)
        if few.any():
            work = self._ways.plainest_work(self._space.work(state, others[few]))
            replicas[few] = self._model.fewest_replicas(work, target_s, replicas[few], after[few])
        return replicas

    @cached_property
    def most_in_flight(self) -> list[Integers]:
        """What the function of this name returns for all stages, by first and last state."""
        assert self._memory_bytes is not None
        space = self._space
        tables = [np.zeros((len(space),) * 2, dtype=np.int64) for _ in range(2)]
        for state in range(len(space) - 1):
            others = space.among_later(state, np.arange(state + 1, len(space)))
            footprint = self._ways.plainest_footprint(state, others, space.work(state, others))
            found = most_in_flight(space, self._model, footprint, self._memory_bytes)
            for table, most in zip(tables, found, strict=False):
                table[state, others] = most
        return tables[: len(found)]


def most_in_flight(space: StateSpace, model: Bounds, footprint: Footprint, memory_bytes: int) -> list[Integers]:
    """Return the most units in flight with which stages fit the memory, and on several replicas if that is less."""
    replicas = (1, 2) if space.layer_costs.counts_replicas else (1,)
    return [model.most_in_flight(space.layer_costs.replicated(footprint, r), memory_bytes) for r in replicas]
