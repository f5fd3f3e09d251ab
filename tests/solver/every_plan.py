"""The best plan of a small chain over replicas, sharding, recomputed units and memory, by trying all of them.

What a stage takes and holds comes from `LayerCosts` and the cost models, one stage at a time. The time of a plan is the
largest of its stages' times, or their sum and their largest, so the stages' ways are chosen from each stage's own best
ones; cuts and replicas are tried all, and no walk or bound of the searches is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product

import numpy as np

from planner.cost.layer_costs import Candidate
from planner.solver.problem import Problem
from planner.solver.reference.brute import options_of

Times = tuple[float, float]  # a stage's parts of the sum over the stages, and of the maximum


@dataclass
class EveryPlan:
    """All plans of a problem on GPUs that are alike."""

    problem: Problem
    _known: dict[tuple[int, int, int, int], list[tuple[Times, Candidate]]] = field(default_factory=dict)

    def best(self) -> tuple[float, tuple[Candidate, ...]] | None:
        """Return the seconds of the fastest plan that is allowed, and the plan."""
        problem = self.problem
        layers, most, best = len(problem.layer_costs.profile.layers), problem.rules.max_stages, None
        for stages in range(1, min(layers, problem.cluster.gpus, most or layers) + 1):
            for cuts in combinations(range(1, layers), stages - 1):
                for replicas in _replicas(stages, problem.cluster.gpus):
                    after = np.cumsum((0, *replicas[:0:-1]))[::-1].tolist()
                    ends = pairwise((0, *cuts, layers))
                    shape = zip(ends, replicas, after, strict=True)
                    ways = [self._ways(*end, r, behind) for end, r, behind in shape]
                    for chosen in product(*ways):
                        seconds = sum(times[0] for times, _ in chosen) + max(times[1] for times, _ in chosen)
                        if best is None or seconds < best[0]:
                            best = seconds, tuple(stage for _, stage in chosen)
        return best

    def _ways(self, first: int, end: int, replicas: int, after: int) -> list[tuple[Times, Candidate]]:
        """Return the ways to run a stage that fit the memory and that no other one beats in both parts of the time."""
        key = first, end, replicas, after
        if key not in self._known:
            layers = frozenset(range(first, end))
            stages = [
                Candidate(frozenset(range(first)), layers, options)
                for options in options_of(self.problem, layers, replicas)
            ]
            ways = sorted(
                ((self._times(stage), stage) for stage in stages if self._fits(stage, after)), key=lambda way: way[0]
            )
            kept: list[tuple[Times, Candidate]] = []
            for times, stage in ways:
                if not kept or times[1] < kept[-1][0][1]:
                    kept.append((times, stage))
            self._known[key] = kept
        return self._known[key]

    def _times(self, stage: Candidate) -> Times:
        work, problem = self.problem.layer_costs.work(stage), self.problem
        if problem.schedule.asynchronous:
            return 0.0, float(problem.asynchronous().stage_s(work, stage.replicas))
        model = problem.synchronous()
        return float(model.sum_s(work, stage.replicas)), float(model.max_s(work, stage.replicas))

    def _fits(self, stage: Candidate, after: int) -> bool:
        problem, schedule = self.problem, self.problem.schedule
        flying = schedule.in_flight(stage.replicas, after, problem.microbatches)
        late = problem.rules.max_staleness
        if schedule.divides and stage.replicas > problem.microbatches:
            return False  # would idle
        if not schedule.versions_suffice(problem.microbatches, stage.replicas, flying):
            return False
        if late is not None and schedule.staleness(flying) > late:
            return False
        footprint = problem.layer_costs.footprint(stage).divided(problem.microbatches)
        limit = problem.cluster.memory_bytes
        return limit is None or float(footprint.total_bytes(flying, schedule.versions(flying))) <= limit


def _replicas(stages: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of replicas of so many stages on so many GPUs at most."""
    for ends in combinations(range(1, gpus + 1), stages):
        yield tuple(end - start for start, end in pairwise((0, *ends)))
