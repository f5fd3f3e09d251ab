"""Plans for devices on which memory goes to more than tensors: a CUDA context, communicators, fragmentation.

How many communicators a worker has depends on the replicas of its neighbours, which a search that walks along the
layers does not know. So searches are asked for plans whose tensors fit what is left of the memory, and what they find
must fit with the communicators that the plan really has. Without any communicators this is a relaxation, whose bound
holds for all plans; its answer, if it fits, is the best. Otherwise room is kept for more communicators on every device
until an answer fits, and it may not be the best: a plan whose stages need fewer might have done with less room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from planner.cost.communicators import communicators, with_overheads
from planner.cost.weight_copies import copies_fit
from planner.errors import InfeasibleError
from planner.solver.candidates.first_plans import Leaner
from planner.solver.problem import Problem
from planner.solver.result import Evaluation, Found
from planner.units import format_bytes

# Of a replicated stage with a neighbour on each side and as many replicas there: two directions each, an all-reduce.
_USUAL = 5


def solve_with_room(problem: Problem, answer: Callable[[Problem], Found]) -> Found:
    """Find the best plan of the search `answer` that fits the memory with the overheads of its devices.

    Raises:
        InfeasibleError: if there is none.
    """
    overheads = problem.layer_costs.overheads
    if overheads is None:
        return answer(problem)

    def with_room_for(count: int) -> Found:
        problem.budget.seen.clear()  # the same stages may be deeper or shallower with another limit
        reserve = overheads.reserve(count)
        cluster = reserve.cluster(problem.cluster)
        of_tensors = problem.layer_costs.of_tensors
        found = answer(replace(problem.on(cluster), layer_costs=of_tensors, reserve=reserve))
        return replace(found, best=_charged(problem, found.best))

    relaxed = found = with_room_for(0)
    count = 0
    while not _fits(problem, found.best):
        if problem.deadline.passed:
            lean = Leaner(problem).lean_enough(found.best.stages)
            if lean is not None and _fits(problem, lean):
                return found.with_best(lean)
        most = _most_communicators(problem, found.best)
        if most <= count:
            break  # what lacks room are copies of tied weights, as no plan has less
        more = count + 1 if count < _USUAL else min(most, 2 * count)
        count = most if problem.deadline.passed else more  # there is no time to find out whether less room does
        try:
            found = with_room_for(count)
        except InfeasibleError as cause:
            raise InfeasibleError(
                f"no plan was found on {problem.cluster.gpus} GPUs that leaves room for its communicators, of "
                f"{format_bytes(overheads.communicator_bytes)} each",
                hint=f"{cause.hint}; or try a smaller `gpus`, because fewer replicas have fewer communicators",
            ) from None
    return replace(found, bound_s=min(relaxed.bound_s, found.bound_s))


def _fits(problem: Problem, plan: Evaluation) -> bool:
    """Return whether the plan fits the memory with the copies of its tied weights."""
    return plan.fits(problem.cluster) and copies_fit(problem.layer_costs, plan.stages, plan.price, problem.setting)


def _most_communicators(problem: Problem, plan: Evaluation) -> int:
    """Return how many the worker with most of them has, over all its stages."""
    of_worker: Counter[int] = Counter()
    for worker, count in zip(plan.price.workers, communicators(problem.layer_costs, plan.stages), strict=True):
        of_worker[worker] += count
    return max(of_worker.values())


def _charged(problem: Problem, plan: Evaluation) -> Evaluation:
    """Return the plan with the memory of its overheads."""
    memory = with_overheads(problem.layer_costs, plan.stages, plan.price.memory, plan.price.workers)
    return replace(plan, price=replace(plan.price, memory=memory))
