"""Local search from the best plan, by simulation where plans are not too large: what waits less is often near.

The searches minimise busy time, and only what they propose is simulated. A plan with a cut a block further on, or with
a replica elsewhere, may be busier by a little and wait less by more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from planner.cost.rounding import SLACK
from planner.solver.candidates.evaluation import SETTLED, priced_path, simulated
from planner.solver.candidates.orders import in_every_order
from planner.solver.chain.best_ways import BestWays
from planner.solver.chain.states import Chain
from planner.solver.levels.local_search import Effort, LocalSearch
from planner.solver.problem import Problem
from planner.solver.result import CutPath, Evaluation, Found

MOST_PRICED = 200  # plans that are priced from each start; few of them are simulated
MOST_LAYERS = 2_000  # of the plans that are priced, together: pricing takes as long as the model is large


def improved(problem: Problem, found: Found, others: Iterable[Evaluation] = ()) -> Found:
    """Return the answer with the fastest plan that single changes lead to, one after the other.

    Args:
        problem: whose budget is spent.
        found: of its searches.
        others: plans to begin from beside the best one.
    """
    best = found.best
    if best.seconds <= found.bound_s * (1 + SETTLED) or problem.budget.over:
        return found
    walk = _Walk(problem, best)
    for start in [best, *(other for other in others if other.stages != best.stages)]:
        walk.from_(start)
    return found if walk.best is best else found.with_best(walk.best)


class _Walk:
    """Local searches that share their budget, and the best plan so far."""

    def __init__(self, problem: Problem, best: Evaluation) -> None:
        self._problem, self.best = problem, best
        self._space = Chain(problem.layer_costs)
        most = max(1, min(MOST_PRICED, MOST_LAYERS * MOST_PRICED // (4 * len(problem.layer_costs.profile.layers))))
        effort, ways = Effort(most, problem.budget.deadline), BestWays(problem, self._space)
        self._search = LocalSearch(self._space, problem.cluster.gpus, self._seconds, effort, ways.options)
        self._known: dict[CutPath, float] = {}

    def from_(self, start: Evaluation) -> None:
        """Search from a plan, if it is one along the profile's order."""
        if (path := _path(self._space, start)) is not None:
            self._known[path] = start.counted_s
            self._search.from_(path)

    def _seconds(self, path: CutPath) -> float:
        """Return the seconds that count; infinity for what does not fit, or cannot be faster than the best plan."""
        if path in self._known:
            return self._known[path]
        plan = priced_path(self._problem, self._space, path)
        if not self._problem.allows(plan):
            return np.inf
        least_s = np.inf
        for order in in_every_order(self._problem, [plan]):
            if self._problem.budget.over:
                self._problem.budget.exhausted = False
                break
            if order.seconds >= min(least_s, self.best.counted_s) * (1 - SLACK):
                break  # simulating only adds waiting
            evaluation = simulated(self._problem, order, self.best.counted_s)
            least_s = min(least_s, evaluation.counted_s)
            self.best = evaluation if evaluation.saves(self.best) else self.best
        return least_s


def _path(space: Chain, plan: Evaluation) -> CutPath | None:
    """Return a plan's path over the space; None where its stages are no runs of consecutive layers that may be cut."""
    lengths = [len(space.layers(0, state)) for state in range(len(space))]
    ends = [0, *(len(stage.before) + len(stage.layers) for stage in plan.stages)]
    runs = all(stage.before == frozenset(range(end)) for stage, end in zip(plan.stages, ends, strict=False))
    if not runs or any(end not in lengths for end in ends) or any(stage.ranks for stage in plan.stages):
        return None
    states = tuple(lengths.index(end) for end in ends)
    return CutPath(states, tuple(stage.options for stage in plan.stages), np.inf)
