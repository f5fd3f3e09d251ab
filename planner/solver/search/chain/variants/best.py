"""The best ways to run the stages of plans whose cuts and replicas are given."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.cost.candidate import StageOptions
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import CutSpace
from planner.solver.search.chain.variants.space import StageVariants, Variants


@dataclass(frozen=True)
class QuickestVariants:
    """The best ways to run the stages of plans, which have room for `deeper` times the published
    depths.
    """

    problem: Problem
    space: CutSpace
    deeper: float = 1.0
    _known: dict[tuple[int, int, int, int], StageOptions] = field(
        default_factory=dict, compare=False
    )

    @cached_property
    def _variants(self) -> StageVariants:
        return StageVariants(self.space, self.problem.limits)

    def options(self, states: Sequence[int], replicas: Sequence[int]) -> tuple[StageOptions, ...]:
        """Return how each stage is quickest among the ways that fit the memory; the plainest way
        where none does.
        """
        limited = self.problem.cluster.memory_bytes is not None
        after = sum(replicas)
        options = list[StageOptions]()
        for (state, end), r in zip(pairwise(states), replicas, strict=True):
            after -= r
            key = (state, end, r, after if limited else 0)
            if key not in self._known:
                self._known[key] = self._stage(state, end, r, after)
            options.append(self._known[key])

        return tuple(options)

    def _stage(self, state: int, end: int, replicas: int, after: int) -> StageOptions:
        ends = np.array([end])
        variants = self._variants.all(state, ends)
        row = self._quickest(variants, replicas, after)
        if row is None and self._variants.chooses:
            variants = self._variants.all(state, ends, np.array([True]))
            row = self._quickest(variants, replicas, after)

        return variants.options(row or 0, replicas)

    def _quickest(self, variants: Variants, replicas: int, after: int) -> int | None:
        problem = self.problem
        in_flight = int(problem.schedule.in_flight(replicas, after, problem.microbatches))
        if after:
            in_flight = math.ceil(in_flight * self.deeper)
        fits = variants.fit(replicas, in_flight, problem.schedule, problem.microbatches)
        fits &= variants.allowed(replicas)
        if not fits.any():
            return None

        sum_s, max_s = problem.parts_s(variants.work, replicas)
        return int(np.argmin(np.where(fits, sum_s + max_s, np.inf)))
