"""The best plan of a small chain over replicas, degrees, sharding, recomputed units and memory, by
trying all of them.

What a stage takes and holds comes from `LayerCosts` and the cost models, one stage at a time. The
time of a plan is the largest of its stages' times, or their sum and their largest, so the stages'
ways are chosen from each stage's own best ones; cuts and replicas are tried all, and no walk or
bound of the searches is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import numpy as np

from planner.cost.candidate import Candidate
from planner.solver.problem.problem import Problem
from tests.solver.stage_ways import Way, combined, options_of, unbeaten


@dataclass
class EveryPlan:
    """All plans of a problem on GPUs that are alike."""

    problem: Problem
    _known: dict[tuple[int, int, int, int, int], list[Way]] = field(default_factory=dict)

    def best(self) -> tuple[float, tuple[Candidate, ...]] | None:
        """Return the seconds of the fastest plan that is allowed, and the plan."""
        problem = self.problem
        layers, most, best = len(problem.layer_costs.profile.layers), problem.rules.max_stages, None
        for stages in range(1, min(layers, problem.cluster.gpus, most or layers) + 1):
            for cuts in combinations(range(1, layers), stages - 1):
                for replicas in _replicas(stages, problem.cluster.gpus):
                    after = np.cumsum((0, *replicas[:0:-1]))[::-1].tolist()
                    ends = tuple(pairwise((0, *cuts, layers)))
                    for degrees in ((degree,) * stages for degree in problem.rules.tensor or (1,)):
                        if np.dot(replicas, degrees) > problem.cluster.gpus:
                            continue
                        shape = zip(ends, replicas, degrees, after, strict=True)
                        for seconds, chosen in combined(
                            self._ways(*end, r, t, behind) for end, r, t, behind in shape
                        ):
                            if best is None or seconds < best[0]:
                                best = seconds, chosen
        return best

    def _ways(self, first: int, end: int, replicas: int, degree: int, after: int) -> list[Way]:
        key = first, end, replicas, degree, after
        if key not in self._known:
            layers = frozenset(range(first, end))
            options = [
                replace(each, tensor=degree) for each in options_of(self.problem, layers, replicas)
            ]
            stages = [Candidate(frozenset(range(first)), layers, each) for each in options]
            self._known[key] = unbeaten(self.problem, stages, after)
        return self._known[key]


def _replicas(stages: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of replicas of so many stages on so many GPUs at most."""
    for ends in combinations(range(1, gpus + 1), stages):
        yield tuple(end - start for start, end in pairwise((0, *ends)))
