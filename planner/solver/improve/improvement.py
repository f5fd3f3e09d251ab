"""Improve the pool's best plan: local search on simulated times, deeper pipelines, and less late
gradients.

No change of one thing leads from nine replicas to a short pipeline, so local search begins at the
fastest plan, and at the fastest of each of a few other numbers of stages. Where GPUs are of several
kinds, it begins at the fastest plans by the cost model that differ in their cuts or replicas; it
changes how many replicas each stage has, and `planner.solver.improve.allotment` says which GPUs
they are.
"""

import math
from collections.abc import Iterable

import numpy as np

from planner.formats.files import replace
from planner.solver.evaluate.evaluation import simulated
from planner.solver.evaluate.orders import in_every_order
from planner.solver.improve.allotment import allotted
from planner.solver.improve.branches import space_around
from planner.solver.pool import Pool
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import CutPath, Evaluation, stages_along
from planner.solver.problem.states import Chain, CutSpace
from planner.solver.search.chain.variants import QuickestVariants
from planner.solver.search.levels.local_search import LocalSearch, OptionsOf
from planner.units import SLACK


def improve(pool: Pool) -> None:
    """Replace the pool's best plan by a faster one that changes lead to, one after the other."""
    problem = pool.problem
    if problem.schedule.chunked or problem.solver == "ilp":
        return

    # Stages may run in any way that keeps room for what is no tensor.
    searched = problem
    if problem.layer_costs.overheads is not None:
        searched = problem.with_room(pool.room)
    climb(pool, searched)
    deepen(pool, searched)


def least_late(pool: Pool) -> None:
    """Let the pool's best plan be the least late one of those that were simulated, and are nearly
    as fast.
    """
    best = pool.best
    if best is None or not best.simulated or not pool.problem.schedule.stashes:
        return

    seen = pool.problem.budget.seen.values()
    nearly_s = best.seconds * pool.problem.tuning.evaluate.min_speedup_per_stale_update
    near = [plan for plan in seen if plan.seconds < nearly_s]
    allowed = [plan for plan in near if pool.problem.allows(plan) and pool.trains(plan)]
    chosen = min([best, *allowed], key=_lateness)
    if max(chosen.price.in_flight) < max(best.price.in_flight):
        pool.staler = best
    pool.best = chosen


def _lateness(plan: Evaluation) -> tuple[int, float]:
    return max(plan.price.in_flight), plan.seconds


def climb(pool: Pool, searched: Problem) -> None:
    """Search from the best plan and from some others by single changes."""
    best = pool.best
    if best is None or pool.settled or pool.problem.budget.over:
        return
    space = _space_around(searched, best)
    first = _path(searched, space, best)
    if first is None:
        return

    # 1. Where to begin.
    mixed = bool(pool.problem.cluster.kinds)
    others = _fastest_by_shape(pool) if mixed else _fastest_simulated(pool)
    paths = [_path(searched, space, plan) for plan in others]
    starts = [first, *(path for path in paths if path is not None)]

    # 2. From each of them.
    trials = _Trials(pool, searched, space, first)
    local_search = LocalSearch(
        space,
        pool.problem.cluster.gpus,
        trials.seconds,
        _ways(searched, space),
        trials.most_priced,
        searched.tuning.levels.split_shares,
        pool.problem.budget.clock,
        trials.least_s,
    )
    for start in starts:
        local_search.from_(start)
        if not mixed:  # whose starts share one allowance
            local_search.allow(trials.most_priced)
            trials.allow()


def _ways(searched: Problem, space: CutSpace) -> list[OptionsOf]:
    """Return how stages may run: those that recompute more than they must have room for deeper
    pipelines.
    """
    limited = searched.cluster.memory_bytes is not None and not searched.cluster.kinds
    published, *deeper = searched.tuning.improve.depth_ratios
    depths = [published, *(deeper if limited else ())]
    return [QuickestVariants(searched, space, ratio).options for ratio in depths]


def _fastest_simulated(pool: Pool) -> list[Evaluation]:
    """Return the fastest plans that were simulated with each other number of stages, then with
    other replicas.
    """
    best = pool.best
    assert best is not None
    problem = pool.problem
    seen = [plan for plan in problem.budget.seen.values() if problem.allows(plan)]
    seen.sort(key=lambda plan: plan.seconds)

    by_stages = {len(best.stages): best}
    by_config = {best.config: best}
    for plan in seen:
        by_stages.setdefault(len(plan.stages), plan)
        by_config.setdefault(plan.config, plan)

    starts: dict[str, Evaluation] = {}
    for plan in (*by_stages.values(), *by_config.values()):
        starts[plan.config] = plan
    return list(starts.values())[1 : problem.tuning.improve.starts]


def _fastest_by_shape(pool: Pool) -> list[Evaluation]:
    """Return the fastest plans by the cost model that differ in their cuts or replicas."""
    by_shape: dict[object, Evaluation] = {}
    for plan in sorted(pool.usable, key=lambda plan: plan.seconds):
        shape = tuple((stage.layers, stage.replicas) for stage in plan.stages)
        by_shape.setdefault(shape, plan)

    return list(by_shape.values())[: pool.problem.tuning.improve.mixed_starts]


class _Trials:
    """What local search minimises: the simulated seconds of paths that may be faster than the
    pool's best plan.
    """

    def __init__(self, pool: Pool, searched: Problem, space: CutSpace, first: CutPath) -> None:
        self._pool = pool
        self._searched = searched
        self._space = space
        self._first = first
        self._orders: dict[CutPath, list[Evaluation]] = {}
        assert pool.best is not None
        self._start = pool.best

        problem = pool.problem
        tuning = problem.tuning.improve
        farther = tuning.levels_ratio if problem.placed else 1

        # 1. Plans that are priced: fewer of large models.
        layers = len(problem.layer_costs.profile.layers)
        priced = tuning.most_priced * farther
        self.most_priced = priced * tuning.few_layers // max(tuning.few_layers, layers)

        # 2. Instructions that are simulated.
        self._instructions = tuning.most_instructions * max(1, farther // 2)
        self._budget = problem.budget.apart(min(problem.budget.left, self._instructions))
        self._problem = replace(problem, budget=self._budget)

        # 3. Stages on unlike GPUs update at different times, which the cost model of synchronous
        # schedules adds up.
        adds = problem.cluster.kinds and not problem.schedule.asynchronous
        self._lenient = tuning.overpriced_ratio if adds else 1 - SLACK

    def allow(self) -> None:
        """Let the next start spend as much as the first one."""
        self._budget.left = min(self._pool.problem.budget.left, self._instructions)

    def least_s(self, path: CutPath) -> float:
        """Return seconds that no plan of the path is below; infinity where none is allowed."""
        orders = in_every_order(self._problem, self._plans(path))
        self._orders[path] = orders
        if path == self._first:
            return 0.0
        if not orders:
            return np.inf
        return orders[0].seconds / max(1.0, self._lenient)

    def seconds(self, path: CutPath) -> float:
        """Return the seconds that count; infinity for what cannot be faster than the best plan."""
        least_s = np.inf
        if path == self._first:
            least_s = self._problem.comparable_s(self._start)

        for order in self._orders.pop(path):
            # There is no time left; or simulating, which only adds waiting, cannot help.
            enough_s = min(least_s, self._pool.best_s) * self._lenient
            if self._budget.over or order.seconds >= enough_s:
                break

            evaluation = simulated(self._problem, order, self._pool.best_s)
            if self._start.simulated and not evaluation.simulated:
                break  # the budget ended the simulation
            if not self._pool.trains(evaluation):
                continue

            least_s = min(least_s, self._problem.comparable_s(evaluation))
            self._pool.keep(evaluation)

        return least_s

    def _plans(self, path: CutPath) -> Iterable[Evaluation]:
        if self._problem.cluster.kinds:
            return allotted(self._problem, stages_along(self._space, path))
        if path == self._first:
            return ()

        plan = self._pool.priced(stages_along(self._space, path))
        if not self._problem.allows(plan):
            return []
        return [plan]


def deepen(pool: Pool, searched: Problem) -> None:
    """Let stages recompute more and run deeper, where a long pipeline then waits less.

    Under schedules that drain, a pipeline that is deeper in some stages alone may take twice as
    long, so that local search, which changes a stage at a time, does not meet one that is deeper in
    all.
    """
    best = pool.best
    problem = pool.problem
    if best is None or not _may_wait(best, problem):
        return
    space = _space_around(searched, best)
    path = _path(searched, space, best)
    if path is None:
        return

    # What takes long because it waits is simulated to its end.
    unlimited = replace(problem, budget=problem.budget.apart(math.inf))
    for ratio in problem.tuning.improve.depth_ratios[1:]:
        variants = QuickestVariants(searched, space, ratio)
        options = variants.options(path.states, path.replicas)
        plan = pool.priced(stages_along(space, replace(path, options=options)))

        below_s = min(pool.best_s, problem.hopeless_s)
        if plan.seconds >= below_s or problem.budget.clock.passed or not problem.allows(plan):
            continue

        evaluation = simulated(unlimited, plan, pool.best_s)
        if evaluation.simulated and pool.trains(evaluation):
            pool.keep(evaluation)


def _may_wait(plan: Evaluation, problem: Problem) -> bool:
    """Return whether a plan under a schedule that drains waits for long, and the memory keeps its
    stages from being deeper.
    """
    schedule = problem.schedule
    limited = problem.cluster.memory_bytes is not None and not problem.cluster.kinds
    if schedule.asynchronous or not schedule.deepens or not limited:
        return False

    usual_s = problem.tuning.evaluate.assumed_waiting_share * plan.seconds
    return plan.seconds - plan.price_s > usual_s


def _space_around(problem: Problem, plan: Evaluation) -> CutSpace:
    """Return the cuts along the profile's order, and those near a plan's own if it has others."""
    if plan.in_order:
        return Chain(problem.layer_costs)
    return space_around(problem, plan.stages)


def _path(problem: Problem, space: CutSpace, plan: Evaluation) -> CutPath | None:
    """Return a plan's path over the space; None where some stage ends at none of its states."""
    if not problem.cluster.kinds and any(stage.ranks for stage in plan.stages):
        return None

    states = [0]
    for stage in plan.stages:
        state = space.state_of(stage.before | stage.layers)
        if state is None:
            return None
        states.append(state)

    return CutPath(tuple(states), tuple(stage.options for stage in plan.stages), np.inf)
