"""Local search from the best plans, by simulation where plans are not too large: what waits less is often near.

The searches minimise busy time, and only what they propose is simulated. A plan with a cut a block further on, or with
a replica elsewhere, may be busier by a little and wait less by more. No change of one thing leads from nine replicas to
a short pipeline, so the search begins at the fastest plan, and at the fastest of each of a few other numbers of stages.

Where GPUs are of several kinds, the search changes how many replicas each stage has, and `allotted` says which GPUs
they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, permutations, product

import numpy as np

from planner.cost.candidate import Candidate
from planner.solver.choose.first_plans import Leaner
from planner.solver.evaluate.evaluation import SETTLED, in_every_order, priced, priced_path, simulated
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath, Evaluation, Found, stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.chain.ways import BestWays
from planner.solver.search.levels.local_search import LocalSearch
from planner.units import SLACK

MOST_ALLOTMENTS = 24  # ways to share out the GPUs that are priced for one plan
STARTS = 4  # of the search, each at another number of stages
FARTHER = 4  # times as many plans are priced on clusters of several levels, with half as many times the instructions
MOST_PRICED, FEW_LAYERS = 100, 50  # plans priced from each start, for models of so many layers; of larger ones, fewer
DEEPER = (1.0, 1.5, 2.0)  # times the published depths that stages are given room for
ADDED = 1.25  # times the best plan's seconds, up to which plans are simulated that may take less than their price
MOST_INSTRUCTIONS = 2**16  # of the simulations from each start: a part of a second


def improved(problem: Problem, found: Found, others: Sequence[Evaluation] = ()) -> Found:
    """Return the answer with the fastest plan that single changes lead to, one after the other.

    Args:
        problem: whose budget is spent.
        found: the answer, with which the search begins.
        others: plans with which it begins again, as far as the effort for one start allows. By default they are plans
            that were simulated before, each with an effort of its own.
    """
    best = found.best
    if best.seconds <= found.bound_s * (1 + SETTLED) or problem.budget.over:
        return found
    space, budget = Chain(problem.layer_costs), problem.budget
    if (path := _path(problem, space, best)) is None:
        return found
    again = others or _met(problem, best)
    # Where links differ, the searches propose worse starts.
    more = FARTHER if problem.placed else 1
    most_instructions = MOST_INSTRUCTIONS * max(1, more // 2)
    own = budget.apart(min(budget.left, most_instructions))
    trials = _Trials(replace(problem, budget=own), space, path, best)
    layers = len(problem.layer_costs.profile.layers)
    most = MOST_PRICED * more * FEW_LAYERS // max(FEW_LAYERS, layers)
    # Stages that recompute more than the published depths demand have room for deeper pipelines.
    limited = problem.cluster.memory_bytes is not None and not problem.cluster.kinds
    ways = [BestWays(problem, space, deeper).options for deeper in (DEEPER if limited else (1.0,))]
    gpus, deadline = problem.cluster.gpus, budget.deadline
    local_search = LocalSearch(space, gpus, trials.seconds, ways, most, deadline, trials.least_s)
    starts = (_path(problem, space, plan) for plan in again)
    for start in (path, *filter(None, starts)):
        local_search.from_(start)
        if not others:
            local_search.allow(most)
            own.left = min(budget.left, most_instructions)
    budget.count += own.count
    return found if trials.best is best else found.with_best(trials.best)


def _met(problem: Problem, best: Evaluation) -> list[Evaluation]:
    """Return the fastest plans that were simulated with each other number of stages, then with other replicas."""
    seen = sorted(filter(problem.allows, problem.budget.seen.values()), key=lambda plan: plan.seconds)
    stages, configs = {len(best.stages): best}, {best.config: best}
    for plan in seen:
        stages.setdefault(len(plan.stages), plan)
        configs.setdefault(plan.config, plan)
    starts = {plan.config: plan for plan in (*stages.values(), *configs.values())}
    return list(starts.values())[1:STARTS]


class _Trials:
    """The best plan so far, and how plans are compared with it."""

    def __init__(self, problem: Problem, space: Chain, path: CutPath, start: Evaluation) -> None:
        self._problem, self._space, self._path, self._start, self.best = problem, space, path, start, start
        # Stages on unlike GPUs update at different times, which the cost model of synchronous schedules adds up.
        adds = problem.cluster.kinds and not problem.schedule.asynchronous
        self._lenient = ADDED if adds else 1 - SLACK
        self._orders: dict[CutPath, list[Evaluation]] = {}

    def least_s(self, path: CutPath) -> float:
        """Return seconds that no plan of the path is below; infinity where none is allowed."""
        plans: Iterable[Evaluation] = ()
        if self._problem.cluster.kinds:
            plans = allotted(self._problem, stages_along(self._space, path))
        elif path != self._path and self._problem.allows(plan := priced_path(self._problem, self._space, path)):
            plans = [plan]
        orders = self._orders[path] = in_every_order(self._problem, plans)
        if path == self._path:
            return 0.0
        return orders[0].seconds / max(1.0, self._lenient) if orders else np.inf

    def seconds(self, path: CutPath) -> float:
        """Return the seconds that count; infinity for what cannot be faster than the best plan."""
        least_s = self._start.counted_s if path == self._path else np.inf
        for order in self._orders.pop(path):
            if self._problem.budget.over or order.seconds >= min(least_s, self.best.counted_s) * self._lenient:
                break  # there is no time left; or simulating, which only adds waiting, cannot help
            evaluation = simulated(self._problem, order, self.best.counted_s)
            if self._start.simulated and not evaluation.simulated:
                break  # the budget ended the simulation
            least_s = min(least_s, evaluation.counted_s)
            self.best = evaluation if evaluation.saves(self.best) else self.best
        return least_s


def _path(problem: Problem, space: Chain, plan: Evaluation) -> CutPath | None:
    """Return a plan's path over the space; None where its stages are no runs of consecutive layers that may be cut."""
    lengths = [len(space.layers(0, state)) for state in range(len(space))]
    ends = [0, *(len(stage.before) + len(stage.layers) for stage in plan.stages)]
    runs = all(stage.before == frozenset(range(end)) for stage, end in zip(plan.stages, ends, strict=False))
    placed = not problem.cluster.kinds and any(stage.ranks for stage in plan.stages)
    if not runs or placed or any(end not in lengths for end in ends):
        return None
    states = tuple(lengths.index(end) for end in ends)
    return CutPath(states, tuple(stage.options for stage in plan.stages), np.inf)


_Ranks = tuple[tuple[int, ...], ...]  # of each stage


def allotted(problem: Problem, stages: Sequence[Candidate]) -> Iterator[Evaluation]:
    """Yield the plans of these stages on GPUs of the kinds, as far as they are allowed.

    Stages take consecutive GPUs of the kinds in every order, the first stage or the heaviest one first. In small
    clusters other mixtures follow. Stages recompute as memory demands.
    """
    leaner, replicas = Leaner(problem), [stage.replicas for stage in stages]
    kinds = [tuple(ranks) for ranks in problem.cluster.kind_ranks]
    shares_s = [float(problem.layer_costs.work(stage).compute_s) / stage.replicas for stage in stages]
    heaviest = sorted(range(len(stages)), key=lambda number: -shares_s[number])
    orders = [range(len(stages)), heaviest, range(len(stages) - 1, -1, -1)]
    lines = (_in_line(replicas, order, kinds_first) for kinds_first in permutations(kinds) for order in orders)
    found = dict.fromkeys((*islice(lines, MOST_ALLOTMENTS), *islice(_mixtures(replicas, kinds), MOST_ALLOTMENTS)))
    for ranks in islice(found, MOST_ALLOTMENTS):
        placed = [
            replace(stage, ranks=own, options=replace(stage.options, recompute=()))
            for stage, own in zip(stages, ranks, strict=True)
        ]
        if (plan := leaner.lean_enough(priced(problem, placed).stages)) is not None:
            yield plan


def _in_line(replicas: Sequence[int], order: Sequence[int], kinds: Sequence[Sequence[int]]) -> _Ranks:
    line = chain(*kinds)
    ranks = {number: tuple(sorted(islice(line, replicas[number]))) for number in order}
    return tuple(ranks[number] for number in range(len(replicas)))


def _mixtures(replicas: Sequence[int], free: Sequence[tuple[int, ...]]) -> Iterator[_Ranks]:
    """Yield the first free GPUs of each kind for the stages, for all numbers of each kind."""
    if not replicas:
        yield ()
        return
    for counts in product(*(range(min(len(own), replicas[0]) + 1) for own in free)):
        if sum(counts) == replicas[0]:
            own = tuple(rank for ranks, count in zip(free, counts, strict=True) for rank in ranks[:count])
            left = [ranks[count:] for ranks, count in zip(free, counts, strict=True)]
            yield from ((own, *others) for others in _mixtures(replicas[1:], left))
