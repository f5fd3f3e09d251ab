"""The fastest of all plans on GPUs of several kinds, by trying them.

On one level, what a stage takes and holds is computed once for each run of layers and GPUs, and the
parts of the time are added up for every plan. On several levels every plan has its price by the
cost model, on all ranks that its stages may have. The best ones are then simulated, as the planner
simulates its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, count, pairwise, product

from benchmarks.solver_quality.stage_ways import Way, combined, options_of, unbeaten
from planner.cost.candidate import Candidate, StageOptions
from planner.cost.kinds import kind_on
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.problem.problem import Problem

Ranks = tuple[int, ...]
Stages = tuple[Candidate, ...]


def best_s(problem: Problem, simulated: int) -> float | None:
    """Return the seconds of the fastest plan among so many of the best by the cost model; None if
    no plan fits.
    """
    flat = len(problem.cluster.joined) == 1
    every = _Flat(problem).plans() if flat else _on_levels(problem)
    number = count()  # of equally fast plans, the first
    best = heapq.nsmallest(
        simulated, ((seconds, next(number), stages) for seconds, stages in every)
    )
    plans = [evaluate(problem, stages) for _, _, stages in best]
    return min((plan.seconds for plan in plans), default=None)


@dataclass
class _Flat:
    """All plans on links that are all alike, where it does not matter which GPUs of a kind a stage
    has.
    """

    problem: Problem
    _known: dict[tuple[int, int, Ranks, int], list[Way]] = field(default_factory=dict)

    def plans(self) -> Iterator[tuple[float, Stages]]:
        """Yield seconds and stages; of the ways to run a stage, those that no other one beats in
        both parts.
        """
        for ends in _cuts(len(self.problem.layer_costs.profile.layers)):
            for ranks in self._ranks(len(ends)):
                after = [sum(map(len, ranks[number + 1 :])) for number in range(len(ranks))]
                yield from combined(
                    self._ways(*end, own, rest)
                    for end, own, rest in zip(ends, ranks, after, strict=True)
                )

    def _ranks(self, stages: int) -> Iterator[tuple[Ranks, ...]]:
        """Yield the ranks of so many stages, for all numbers of GPUs of each kind."""
        shares = [
            [tuple(pairwise(ends)) for ends in _divisions(ranks.start, ranks.stop, stages)]
            for ranks in self.problem.cluster.kind_ranks
        ]
        for kinds in product(*shares):
            found = tuple(
                tuple(chain(*(range(*own) for own in stage))) for stage in zip(*kinds, strict=True)
            )
            if all(found):
                yield found

    def _ways(self, first: int, end: int, ranks: Ranks, after: int) -> list[Way]:
        key = first, end, ranks, after
        if key not in self._known:
            self._known[key] = unbeaten(
                self.problem, _stages(self.problem, first, end, ranks), after
            )
        return self._known[key]


def _on_levels(problem: Problem) -> Iterator[tuple[float, Stages]]:
    gpus = problem.cluster.gpus
    for ends in _cuts(len(problem.layer_costs.profile.layers)):
        for owner in product(range(-1, len(ends)), repeat=gpus):  # -1: the GPU idles
            ranks = [
                tuple(rank for rank in range(gpus) if owner[rank] == stage)
                for stage in range(len(ends))
            ]
            most = problem.microbatches if problem.schedule.divides else gpus
            if not all(1 <= len(own) <= most for own in ranks):
                continue
            for stages in product(
                *(_stages(problem, *end, own) for end, own in zip(ends, ranks, strict=True))
            ):
                plan = priced(problem, stages)
                if problem.allows(plan):
                    yield plan.seconds, plan.stages


def _stages(problem: Problem, first: int, end: int, ranks: Ranks) -> list[Candidate]:
    """Return all ways to run the layers on these ranks."""
    layers = frozenset(range(first, end))
    plain = Candidate(frozenset(range(first)), layers, StageOptions(len(ranks)), ranks)
    kind = kind_on(problem.layer_costs, problem.cluster, plain, ranks)
    return [
        replace(plain, options=replace(options, kind=kind))
        for options in options_of(problem, layers, len(ranks))
    ]


def _cuts(layers: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the first and the end of each stage, for all numbers of stages."""
    for stages in range(1, layers + 1):
        for inner in combinations(range(1, layers), stages - 1):
            yield tuple(pairwise((0, *inner, layers)))


def _divisions(first: int, end: int, parts: int) -> Iterator[Ranks]:
    """Yield the borders of so many parts of consecutive ranks from the first on; parts may be
    empty, and some idle.
    """
    if parts == 0:
        yield (first,)
        return
    for border in range(first, end + 1):
        for rest in _divisions(border, end, parts - 1):
            yield (first, *rest)
