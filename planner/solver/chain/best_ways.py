"""The best way to run each stage of a plan whose cuts and replicas are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.cost.stage_options import StageOptions
from planner.cost.work import Floats
from planner.solver.chain.states import StateSpace
from planner.solver.chain.ways import Ways, WaysOf
from planner.solver.problem import Problem


@dataclass(frozen=True)
class BestWays:
    """The best ways to run the stages of plans for one problem over one space.

    Attributes:
        problem: with the memory.
        space: of the stages.
        deeper: times the published depths that stages have room for.
    """

    problem: Problem
    space: StateSpace
    deeper: float = 1.0

    @cached_property
    def _known(self) -> dict[tuple[int, int, int, int], StageOptions]:
        """Options that were found before: local search asks for the same stages again and again."""
        return {}

    @cached_property
    def _ways(self) -> WaysOf:
        return WaysOf(self.space, self.problem.limits, prices_shards=self.problem.simulates)

    def options(self, states: Sequence[int], replicas: Sequence[int]) -> tuple[StageOptions, ...]:
        """Return how each stage is quickest among the ways that fit the memory; the plainest way where none does."""
        after, found = sum(replicas), list[StageOptions]()
        limited = self.problem.cluster.memory_bytes is not None
        for (state, other), r in zip(pairwise(states), replicas, strict=True):
            after -= r
            key = (state, other, r, after if limited else 0)
            if key not in self._known:
                self._known[key] = self._stage(state, other, r, after)
            found.append(self._known[key])
        return tuple(found)

    def _stage(self, state: int, other: int, r: int, after: int) -> StageOptions:
        ways = self._ways.all(state, np.array([other]), np.array([False]))
        row = self._best(ways, r, after)
        if row is None and self._ways.chooses:
            ways = self._ways.all(state, np.array([other]), np.array([True]))
            row = self._best(ways, r, after)
        return ways.options(row or 0, r)

    def _best(self, ways: Ways, replicas: int, after: int) -> int | None:
        problem, memory_bytes = self.problem, self.problem.cluster.memory_bytes
        fits = ways.allowed(replicas) & np.ones(len(ways), dtype=bool)
        if memory_bytes is not None:
            flying = int(problem.schedule.in_flight(replicas, after, problem.microbatches))
            flying = math.ceil(flying * self.deeper) if after else flying
            footprint = ways.footprint_on(replicas).divided(problem.microbatches)
            fits = fits & (footprint.total_bytes(flying, problem.schedule.versions(flying)) <= memory_bytes)
        if not fits.any():
            return None
        return int(np.argmin(np.where(fits, self._seconds(ways, replicas), np.inf)))

    def _seconds(self, ways: Ways, replicas: int) -> Floats:
        if self.problem.schedule.asynchronous:
            return self.problem.asynchronous().stage_s(ways.work, replicas)
        model = self.problem.synchronous()
        return model.sum_s(ways.work, replicas) + model.max_s(ways.work, replicas)
