"""Search on clusters of several levels: a relaxed programme over the bounds of stages, then plans in their order.

The relaxed programme (`relaxed`) gives plans to start with and what the rest of any partial plan costs at least; the
best-first search (`best_first`) closes what is left between the two, as far as the work allowed goes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.solver.chain.search import Path
from planner.solver.levels.best_first import BestFirst, Found, better
from planner.solver.levels.relaxed import Relaxed, Seconds
from planner.solver.levels.stage_bounds import Question

MOST_ENTRIES = 12_000_000  # of the tables of bounds
MOST_COUNTS = 16  # numbers of GPUs tried one by one where memory is limited


class HierarchySearch:
    """Finds the fastest plan on ranks that are not equally far apart."""

    def __init__(self, question: Question) -> None:
        self.gpus, self.memory_bytes, self._question = question.gpus, question.memory_bytes, question
        self._relaxed = Relaxed(question)

    @staticmethod
    def states_that_fit(question: Question) -> int:
        """How many states a space may have for its tables to be of a reasonable size."""
        groups = question.topology.groups
        phases = int(groups[-2]) if len(groups) > 1 else 1
        return int((2 * MOST_ENTRIES / (phases * question.gpus)) ** 0.5)

    def best(self, price: Seconds, known: Path | None) -> Found:
        """The best path by its true price, starting from a known one."""
        best = known
        counts = self._counts()
        roots = [self._relaxed.rest(gpus) for gpus in counts]
        for rest in roots:
            for path in self._relaxed.paths(rest):
                best = better(best, path, price)
        found = BestFirst(self._question, self._relaxed).best(roots, price, best)
        if self.memory_bytes is None or len(counts) == self.gpus:
            return found
        # Not every number of GPUs was tried: what none of them can beat is told without the memory.
        unlimited = Relaxed(replace(self._question, memory_bytes=None)).rest(self.gpus)
        return replace(found, bound_s=min(found.bound_s, float(unlimited.sum_s[0, 0] + unlimited.max_s[0, 0])))

    def _counts(self) -> list[int]:
        """Numbers of GPUs that a plan may have in all: what a stage holds depends on how many come after it."""
        if self.memory_bytes is None:
            return [self.gpus]
        if self.gpus <= MOST_COUNTS:
            return list(range(1, self.gpus + 1))
        return sorted({int(count) for count in np.geomspace(1, self.gpus, MOST_COUNTS)} | {self.gpus})
