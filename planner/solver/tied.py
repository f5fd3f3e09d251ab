"""Plans for models with tied weights, whose copies need memory, and under 1f1b as many replicas in all their stages.

The searches count a weight once, so their answer is a relaxation. Where its copies do not fit or cannot be trained, the
best plan has all users of a tied weight in one stage, or counts the weight in every layer that uses it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.cost.candidate import Candidate
from planner.cost.weight_copies import copies_fit, counted_with_copies, exchanged_bytes, price_with_copies
from planner.cost.work import IMPOSSIBLE, Integers
from planner.errors import InfeasibleError, PlannerError
from planner.plan.blocks import block_ends
from planner.plan.shape import trainable_pairs
from planner.plan.shared_weights import trained_parameters
from planner.solver.choose.first_plans import fitting_plans
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.evaluate.pipelines import shared_between
from planner.solver.methods import cut_after
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.problem import Answer, Limits, Problem
from planner.solver.problem.result import CutPath, Evaluation, Found, stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.chain.search import ANY_TIME_S, Search
from planner.solver.search.restricted import counts_to_try

_PRECISION = 1e-4
SLOW = 0.05  # of a minibatch: messages of copies that take so much make other plans worth a search
_TRIES = 4  # of a search, each with less memory


def solve_tied(problem: Problem, answer: Answer) -> Found:
    """Find the best plan of the search `answer` whose copies of tied weights fit the memory and can be trained.

    Where links are so slow that copies cost time, it is compared with a plan without any. Raise InfeasibleError if
    there is none.
    """
    found = answer(problem)
    if found.bound_s >= problem.hopeless_s:
        return found
    # The simulations so far were of plans that cannot be used.
    fresh = replace(problem, budget=problem.budget.apart())
    if _trains(problem, found.best):
        sent_s = max(exchanged_bytes(problem.layer_costs, found.best.stages)) / problem.link.bandwidth_bytes_per_s
        others = _together(fresh, answer) if sent_s > SLOW * found.best.seconds else ()
        return found.with_best(min((found.best, *others), key=lambda plan: plan.counted_s))
    plans = [*_together(fresh, answer), *_counted(fresh, answer)]
    fitting = [plan for plan in plans if _trains(problem, plan)]
    if (plan := usual(fresh)) is not None:
        fitting.append(plan)
    if not fitting:
        _refuse(fresh, found, answer)
        return found
    by_simulation = all(plan.simulated for plan in fitting)
    return found.with_best(min(fitting, key=lambda plan: plan.seconds if by_simulation else plan.counted_s))


def _trains(problem: Problem, plan: Evaluation) -> bool:
    shared = shared_between(problem.layer_costs, plan.stages)
    if not shared:
        return True
    if not trainable_pairs(shared, [stage.replicas for stage in plan.stages], problem.schedule):
        return False
    return copies_fit(problem.layer_costs, plan.stages, plan.price, problem.setting)


def _refuse(problem: Problem, found: Found, answer: Answer) -> None:
    """Raise InfeasibleError with a schedule that has room for the copies, where the found plan's do not fit."""
    try:
        price_with_copies(problem.layer_costs, found.best.stages, found.best.price, problem.setting)
        return
    except InfeasibleError as error:
        message = error.message
    for other in problem.leaner():
        try:
            fits = _trains(other, solve_tied(other, answer).best)
        except PlannerError:
            continue
        if fits:
            hint = f"use `schedule={other.schedule}` `microbatches={other.microbatches}`, which fits"
            raise InfeasibleError(message, hint=hint)


def _together(problem: Problem, answer: Answer) -> Iterator[Evaluation]:
    between = (range(first, last) for first, *_, last in _users(problem))
    ends = frozenset(range(len(problem.layer_costs.profile.layers))).difference(*between)
    with contextlib.suppress(PlannerError):
        yield answer(replace(cut_after(problem, ends), precision=problem.precision)).best


def usual(problem: Problem) -> Evaluation | None:
    """Return the best by the cost model of the plans that take no search and can be trained; None without one."""
    if problem.schedule.chunked:
        return None
    ends = frozenset[int]() if problem.rules.granularity == "layer" else block_ends(problem.layer_costs.profile)
    plans = fitting_plans(cut_after(problem, ends) if ends else problem)
    plan = next(filter(partial(_trains, problem), plans), None)
    return None if plan is None else evaluate(problem, plan.stages)


def _counted(problem: Problem, answer: Answer) -> Iterator[Evaluation]:
    if not problem.schedule.stashes or problem.cluster.kinds:
        with contextlib.suppress(PlannerError):
            yield from _evaluated(problem, answer(_with_copies(problem, 1)).best.stages)
        return
    gpus, best_s, users = problem.cluster.gpus, np.inf, sorted(set().union(*_users(problem)))
    # The deeper the pipeline, the more rounds of gradients wait for the sums of tied weights.
    depths = [gpus] if problem.cluster.memory_bytes is None else [d for d in counts_to_try(gpus) if d > 1]
    for depth in depths:
        other = _with_copies(problem, depth)
        space, limits = Chain(other.layer_costs), replace(other.limits, deepest=min(depth, other.limits.deepest))
        for replicas in range(gpus // 2, 0, -1):
            search = _EvenSearch(space, other.asynchronous(), limits, users, replicas)
            for plan in _even(problem, other, search, best_s):
                best_s = min(best_s, plan.seconds)
                yield plan


def _even(problem: Problem, counted: Problem, search: "_EvenSearch", below_s: float) -> Iterator[Evaluation]:
    """Yield the best plan of a search over the layers of `counted` that fits, at one or two depths.

    What a stage holds at its peak is counted for its layers together with their copies, and then for its layers and its
    copies apart, which may be more. A plan that does not fit for that reason is sought again with less memory.
    """
    for _ in range(_TRIES):
        if problem.deadline.passed or (path := search.best(below_s)) is None:
            return
        stages = stages_along(search.space, path)
        fitting = [plan for plan in _evaluated(problem, stages) if _trains(problem, plan)]
        yield from fitting
        missed, memory_bytes = _uncounted_bytes(problem, counted, stages), search.limits.memory_bytes
        if fitting or missed <= 0 or memory_bytes is None:
            return
        limits = replace(search.limits, memory_bytes=memory_bytes - missed)
        search = _EvenSearch(search.space, search.model, limits, search.layers, search.replicas)


def _uncounted_bytes(problem: Problem, counted: Problem, stages: Sequence[Candidate]) -> int:
    cluster = problem.cluster
    roomy = replace(problem.setting, cluster=cluster.model_copy(update={"memory_bytes": None}))
    held = price_with_copies(problem.layer_costs, stages, priced(problem, stages).price, roomy).gpu_bytes
    known = priced(counted, stages).price.gpu_bytes
    over = (one - other for one, other in zip(held, known, strict=True) if one > (cluster.memory_bytes or one))
    return max(over, default=0)


def _evaluated(problem: Problem, stages: Sequence[Candidate]) -> Iterator[Evaluation]:
    """Yield the plan at the best depths, and at the published ones, which leave more room for copies."""
    yield (plan := evaluate(problem, stages))
    published = priced(problem, stages).price.in_flight
    if plan.price.in_flight != published:
        yield evaluate(replace(problem, depth="published"), stages)


def _with_copies(problem: Problem, depth: int) -> Problem:
    """Return the problem with tied weights counted in every layer that uses them.

    What stages hold to add up gradients counts as buffers: up to `depth` rounds of what they send and receive.
    """
    held = list[tuple[int, int, int]]()
    for first, *others in _users(problem):  # a copy holds its gradient twice
        held += [(first, first, 2), *((other, first, 2 * depth + 1) for other in others)]
    counted = counted_with_copies(problem.layer_costs.profile, held)
    assert counted is not None
    return problem.with_profile(counted)


def _users(problem: Problem) -> list[tuple[int, ...]]:
    position, users = problem.layer_costs.position, dict[str, list[int]]()
    for layer, weights in trained_parameters(problem.layer_costs.profile).items():
        for weight in weights:
            users.setdefault(weight, []).append(position[layer])
    return sorted({tuple(sorted(layers)) for layers in users.values() if len(layers) > 1})


class _EvenSearch(Search):
    """Finds plans whose stages with any of some layers all have as many replicas."""

    space: Chain

    def __init__(self, space: Chain, model: Bounds, limits: Limits, layers: Sequence[int], replicas: int) -> None:
        super().__init__(space, model, limits)
        self.layers, self.replicas = layers, replicas
        self._holds = np.array([space.holds(layer) for layer in layers])

    def best(self, below_s: float | None = None, precision: float = _PRECISION) -> CutPath | None:
        """Return the fastest plan up to `precision`; one on more replicas than the fewest may miss a target it met."""
        high_s = ANY_TIME_S if below_s is None or np.isinf(below_s) else below_s
        low_s, best, target_s = float(self._before_s[-1]) / self.gpus, None, high_s
        while high_s - low_s > precision * high_s:
            if (path := self.within(target_s)) is not None:
                high_s = min(target_s, path.seconds)
                best = path if best is None or path.seconds < best.seconds else best
            elif target_s == high_s and best is None:
                return None
            else:
                low_s = target_s
            target_s = float(np.sqrt(max(low_s, high_s * _PRECISION) * high_s))
        return best

    def suffixes(
        self, state: int, others: Integers, target_s: float, after: Integers, room: int
    ) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        _, r, again = super().suffixes(state, others, target_s, after, room)
        holds = (self._holds[:, others] & ~self._holds[:, state, None]).any(axis=0)
        r = np.where(holds, np.where(r > self.replicas, IMPOSSIBLE, self.replicas), r)
        return np.where(r >= IMPOSSIBLE, IMPOSSIBLE, after + r), r, again
