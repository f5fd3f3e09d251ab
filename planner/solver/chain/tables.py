"""Tabulate how many replicas all stages of a small model need, instead of many short computations over arrays.

The fewest replicas with which a stage meets a target depend on the GPUs after it only if memory is limited, or under
2bw, and even then those seldom matter. So the table has one entry per first and last state of a stage, for one target
at a time. An entry is computed again only if its replicas are too few for the GPUs after the stage.
"""

from __future__ import annotations

import numpy as np

from planner.cost.work import IMPOSSIBLE, Integers, fewest_to_hold
from planner.solver.bounds.bounds import Bounds
from planner.solver.chain.states import StateSpace
from planner.solver.problem import Limits


class StageTables:
    """Replicas of all stages between the states of `space`."""

    def __init__(self, space: StateSpace, model: Bounds, limits: Limits) -> None:
        self._space, self._model = space, model
        self._gpus, self._memory_bytes = limits.gpus, limits.memory_bytes
        # Tables for the last target, by whether the stages recompute.
        self._replicas: dict[bool, tuple[float, Integers]] = {}
        self._in_flight: dict[bool, Integers] = {}

    def fewest_alone(self, target_s: float, recomputed: bool) -> Integers:
        """Return the fewest replicas that meet the target with no GPUs after them, by first and last state."""
        if recomputed not in self._replicas or self._replicas[recomputed][0] != target_s:
            firsts, others, work = self._space.every_stage
            table = np.full((len(self._space),) * 2, IMPOSSIBLE, dtype=np.int64)
            table[firsts, others] = self._model.fewest_replicas(work.recomputed() if recomputed else work, target_s)
            self._replicas[recomputed] = target_s, table
        return self._replicas[recomputed][1]

    def fewest(self, state: int, others: Integers, target_s: float, after: Integers, recomputed: bool) -> Integers:
        """Return the fewest replicas of the stages from `state` to `others` that meet the target and fit the memory.

        `after`: GPUs after each stage. Where a stage needs more GPUs than there are, the answer is a lower bound.
        """
        alone: Integers = self.fewest_alone(target_s, recomputed)[state, others]
        replicas = np.maximum(alone, self.fewest_to_hold(state, others, after, recomputed))
        enough = replicas == alone
        if self._model.counts_gpus_after:
            enough &= self._model.enough_before(replicas, after)
        few = ~enough & (replicas + after <= self._gpus)
        if few.any():
            work = self._space.work(state, others[few])
            replicas[few] = self._model.fewest_replicas(
                work.recomputed() if recomputed else work, target_s, replicas[few], after[few]
            )
        return replicas

    def fewest_to_hold(self, state: int, others: Integers, after: Integers, recomputed: bool) -> Integers | int:
        """Return the fewest replicas that fit the memory."""
        if self._memory_bytes is None:
            return 1
        if recomputed not in self._in_flight:
            self._in_flight[recomputed] = self._most_in_flight(recomputed)
        return fewest_to_hold(self._in_flight[recomputed][state, others], after)

    def _most_in_flight(self, recomputed: bool) -> Integers:
        assert self._memory_bytes is not None
        space = self._space
        table = np.zeros((len(space),) * 2, dtype=np.int64)
        for state in range(len(space) - 1):
            others = space.among_later(state, np.arange(state + 1, len(space)))
            footprint = space.footprint(state, others, space.work(state, others))
            footprint = footprint.recomputed() if recomputed else footprint
            table[state, others] = self._model.most_in_flight(footprint, self._memory_bytes)
        return table
