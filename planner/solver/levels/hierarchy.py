"""Search on clusters of several levels: a relaxed programme over bounds of stages, then a best-first search.

The relaxed programme (`relaxed`) gives plans to start with, and bounds what the rest of any partial plan costs. The
best-first search (`best_first`) closes the gap between the two, as far as the work allowed permits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.solver.chain.states import StateSpace
from planner.solver.levels.best_first import BestFirst, better
from planner.solver.levels.relaxed import Relaxed, Seconds
from planner.solver.problem import Problem
from planner.solver.result import BoundedPath, CutPath

MOST_ENTRIES = 12_000_000  # in the tables of bounds
MOST_COUNTS = 16  # numbers of GPUs that are tried one by one where memory is limited


class HierarchySearch:
    """Finds the fastest plan on ranks that are not equally far apart."""

    def __init__(self, problem: Problem, space: StateSpace) -> None:
        self.gpus, self.counts_gpus = problem.cluster.gpus, problem.limits.counts_gpus
        self._problem, self._space, self._relaxed = problem, space, Relaxed(problem, space)

    @staticmethod
    def states_that_fit(problem: Problem) -> int:
        """Return how many states a space may have so that its tables have a reasonable size."""
        groups = problem.topology.groups
        phases = int(groups[-2]) if len(groups) > 1 else 1
        return int((2 * MOST_ENTRIES / (phases * problem.cluster.gpus)) ** 0.5)

    def best(self, price: Seconds, known: CutPath | None) -> BoundedPath:
        """Return the best path by its true price, starting from a known one."""
        best = known
        # Where memory is limited, a stage must know how many GPUs come after it, hence how many there are in all.
        counts = self._counts()
        roots = [self._relaxed.rest(gpus) for gpus in counts]
        for rest in roots:
            for path in self._relaxed.paths(rest):
                best = better(best, path, price)
        found = BestFirst(self._problem, self._relaxed).best(roots, price, best)
        if not self.counts_gpus or len(counts) == self.gpus:
            return found
        # Not every number of GPUs was tried, so the bound must hold for all of them: it leaves these limits out.
        without = self._problem.on(self._problem.cluster.model_copy(update={"memory_bytes": None}))
        without = replace(without, rules=replace(without.rules, max_staleness=None))
        unlimited = Relaxed(without, self._space).rest(self.gpus)
        return replace(found, bound_s=min(found.bound_s, float(unlimited.sum_s[0, 0] + unlimited.max_s[0, 0])))

    def _counts(self) -> list[int]:
        """Return numbers of GPUs that a plan may have in all: what a stage holds depends on the GPUs after it."""
        if not self.counts_gpus:
            return [self.gpus]
        if self.gpus <= MOST_COUNTS:
            return list(range(1, self.gpus + 1))
        return sorted({int(count) for count in np.geomspace(1, self.gpus, MOST_COUNTS)} | {self.gpus})
