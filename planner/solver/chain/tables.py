"""How many replicas all stages of a small model need, at once: in place of many short walks over arrays.

The fewest replicas with which a stage meets a target depend on what follows it only where memory is limited, or under
2bw, and then there are seldom more of them. So they are kept by the first and the last state of a stage, for one target
at a time, and looked at again only where they are too few for the GPUs after the stage.
"""

from __future__ import annotations

import numpy as np

from planner.cost.work import IMPOSSIBLE, Integers, fewest_to_hold
from planner.solver.bounds.bounds import Bounds
from planner.solver.chain.states import StateSpace


class StageTables:
    """Replicas of all stages between the states of `space`."""

    def __init__(self, space: StateSpace, model: Bounds, gpus: int, memory_bytes: int | None) -> None:
        self._space, self._model, self._gpus, self._memory_bytes = space, model, gpus, memory_bytes
        # Of the last target, by whether the stages recompute.
        self._replicas: dict[bool, tuple[float, Integers]] = {}
        self._in_flight: dict[bool, Integers] = {}

    def fewest_alone(self, target_s: float, recomputed: bool) -> Integers:
        """By first and last state, the fewest replicas that meet the target with nothing after them."""
        if recomputed not in self._replicas or self._replicas[recomputed][0] != target_s:
            firsts, others, work = self._space.every_stage
            table = np.full((len(self._space),) * 2, IMPOSSIBLE, dtype=np.int64)
            table[firsts, others] = self._model.fewest_replicas(work.recomputed() if recomputed else work, target_s)
            self._replicas[recomputed] = target_s, table
        return self._replicas[recomputed][1]

    def fewest(self, state: int, others: Integers, target_s: float, after: Integers, recomputed: bool) -> Integers:
        """Fewest replicas of the stages that begin at the state, with so many GPUs after them, that fit the memory.

        Of stages that need more GPUs than there are it is left open how many more.
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
        """Fewest replicas that fit the memory."""
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
