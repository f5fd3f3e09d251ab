"""Local search from the best plan, by simulation where plans are not too large: what waits less is often near.

The searches minimise busy time, and only what they propose is simulated. A plan with a cut a block further on, or with
a replica elsewhere, may be busier by a little and wait less by more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost.rounding import SLACK
from planner.solver.candidates.budget import Budget
from planner.solver.candidates.evaluation import SETTLED, priced_path, simulated
from planner.solver.candidates.orders import in_every_order
from planner.solver.chain.best_ways import BestWays
from planner.solver.chain.states import Chain
from planner.solver.levels.local_search import Effort, LocalSearch
from planner.solver.problem import Problem
from planner.solver.result import CutPath, Evaluation, Found

MOST_PRICED, FEW_LAYERS = 100, 50  # plans that are priced, for models of so many layers; of larger ones, fewer
MOST_INSTRUCTIONS = 2**15  # of the simulations: a part of a second


def improved(problem: Problem, found: Found) -> Found:
    """Return the answer with the fastest plan that single changes lead to, one after the other."""
    best = found.best
    if best.seconds <= found.bound_s * (1 + SETTLED) or problem.budget.over:
        return found
    space, budget = Chain(problem.layer_costs), problem.budget
    if (path := _path(space, best)) is None:
        return found
    own = Budget(budget.deadline, min(budget.left, MOST_INSTRUCTIONS), seen=budget.seen, progress=budget.progress)
    trials = _Trials(replace(problem, budget=own), space, best)
    layers = len(problem.layer_costs.profile.layers)
    effort = Effort(MOST_PRICED * FEW_LAYERS // max(FEW_LAYERS, layers), budget.deadline)
    LocalSearch(space, problem.cluster.gpus, trials.seconds, effort, BestWays(problem, space).options).from_(path)
    budget.count += own.count
    return found if trials.best is best else found.with_best(trials.best)


class _Trials:
    """The best plan so far, and how plans are compared with it."""

    def __init__(self, problem: Problem, space: Chain, start: Evaluation) -> None:
        self._problem, self._space, self._start, self.best = problem, space, start, start

    def seconds(self, path: CutPath) -> float:
        """Return the seconds that count; infinity for what does not fit, or cannot be faster than the best plan."""
        plan = priced_path(self._problem, self._space, path)
        if plan.stages == self._start.stages:
            return self._start.counted_s
        if not self._problem.allows(plan):
            return np.inf
        least_s = np.inf
        for order in in_every_order(self._problem, [plan]):
            if self._problem.budget.over or order.seconds >= min(least_s, self.best.counted_s) * (1 - SLACK):
                break  # there is no time left; or simulating, which only adds waiting, cannot help
            evaluation = simulated(self._problem, order, self.best.counted_s)
            if self._start.simulated and not evaluation.simulated:
                break  # the budget ended the simulation
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
