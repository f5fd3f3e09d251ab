"""Steps that settle what no search along the cuts can know, by asking for something that it does know.

Overheads: how many communicators a worker has depends on the replicas of its neighbours. Searches count those that a
stage has in any plan; room is kept for more on every device until an answer fits the memory. The first search is a
relaxation, whose bound holds for all plans.

zb-h1: the cut that is best for 1f1b-flush, with the time of zb-h1's own streams.
"""

import contextlib
from collections import Counter
from dataclasses import replace

from planner.cost.communicators import communicators, with_overheads
from planner.cost.weight_copies import copies_fit, price_with_copies
from planner.errors import InfeasibleError
from planner.options.solving import UNLIMITED
from planner.solver.choose.first_plans import FirstPlans, Leaner
from planner.solver.evaluate.evaluation import TOLERANCE, priced, simulated
from planner.solver.problem.bounds import balanced_s
from planner.solver.problem.infeasible import UnexplainedError
from planner.solver.problem.problem import Answer, Problem
from planner.solver.problem.result import Evaluation, Found
from planner.solver.tied import usual
from planner.units import format_bytes


def solve_zero_bubble(problem: Problem, answer: Answer) -> Found:
    """Under zb-h1, evaluate the stages of the best plan for 1f1b-flush, and bound what no plan can beat."""
    if (other := problem.schedule.solved_as) is problem.schedule:
        return answer(problem)
    problem.budget.seen.clear()  # the same stages are other plans under another schedule
    flush = answer(problem.with_schedule(other))
    assert problem.schedule.divides
    best = simulated(problem, priced(problem, flush.best.stages))
    found = replace(flush, bound_s=balanced_s(problem.layer_costs, problem.setting)).with_best(best)
    return FirstPlans(problem).at_least(found)


_FEW = 5  # communicators beyond those that a search counts, up to which room is made for one at a time


def solve_with_room(problem: Problem, answer: Answer) -> Found:
    """Find the best plan of the search `answer` that fits the memory with the overheads of its devices."""
    overheads = problem.layer_costs.overheads
    if overheads is None:
        return answer(problem)

    def with_room_for(count: int, most_replicas: int = UNLIMITED) -> Found:
        problem.budget.seen.clear()  # the same stages may be deeper or shallower with another limit
        reserve, of_tensors = overheads.reserve(count), problem.layer_costs.of_tensors
        other = problem.with_cluster(problem.cluster.with_memory(reserve.room))
        found = answer(replace(other, layer_costs=of_tensors, reserve=reserve, most_replicas=most_replicas))
        price_with_copies(of_tensors, found.best.stages, found.best.price, other.setting)  # or say why not
        return replace(found, best=_charged(problem, found.best))

    relaxed = found = with_room_for(0)
    if found.bound_s >= problem.hopeless_s:
        return found
    lean: Evaluation | None = None  # the best of the answers that recompute more than they did when they were found
    count = 0
    while not _fits(problem, found.best):
        other = _leaner(problem, found.best)
        lean = other if lean is None or (other is not None and other.saves(lean)) else lean
        close_s = found.best.counted_s * (1 + TOLERANCE)
        if lean is not None and (problem.deadline.passed or lean.counted_s <= close_s):
            return relaxed.with_best(lean)
        beyond: Counter[int] = Counter()  # communicators of each worker that searches do not count
        counts = communicators(problem.layer_costs, found.best.stages)
        for stage, worker, held in zip(found.best.stages, found.best.price.workers, counts, strict=True):
            known = 2 * int(problem.layer_costs.work(stage).neighbours) + (stage.replicas > 1)
            beyond[worker] += held - known
        most = max(beyond.values())
        if most <= count:
            break  # what lacks room are copies of tied weights, as no plan has less
        more = count + 1 if count < _FEW else min(most, 2 * count)
        count = most if problem.deadline.passed else more  # there is no time to find out whether less room does
        try:
            found = with_room_for(count)
        except InfeasibleError as cause:
            if lean is not None:
                return relaxed.with_best(lean)
            with contextlib.suppress(InfeasibleError):  # stages of one replica have few communicators
                if _fits(problem, (straight := with_room_for(0, 1)).best):
                    return relaxed.with_best(straight.best)
            if (plan := usual(problem)) is not None:
                return relaxed.with_best(plan)
            why = cause.explanation() if isinstance(cause, UnexplainedError) else cause
            raise InfeasibleError(
                f"no plan was found on {problem.cluster.gpus} GPUs that leaves room for its communicators, of "
                f"{format_bytes(overheads.communicator_bytes)} each",
                hint=f"{why.hint}; or try a smaller `gpus`, because fewer replicas have fewer communicators",
            ) from None
    if lean is not None and (lean.saves(found.best) or not _fits(problem, found.best)):
        found = found.with_best(lean)
    if not _fits(problem, found.best) and (plan := usual(problem)) is not None:
        return relaxed.with_best(plan)
    price_with_copies(problem.layer_costs, found.best.stages, found.best.price, problem.setting)  # or say why not
    # A search for plans that leave more room may have had too little time for a bound as good.
    return replace(relaxed, name=found.name).with_best(found.best)


def _fits(problem: Problem, plan: Evaluation) -> bool:
    return plan.fits(problem.cluster) and copies_fit(problem.layer_costs, plan.stages, plan.price, problem.setting)


def _leaner(problem: Problem, plan: Evaluation) -> Evaluation | None:
    """Return the plan with stages that recompute as much as makes it fit; None if that is not known, or impossible."""
    if problem.schedule.chunked or (lean := Leaner(problem).lean_enough(plan.stages)) is None:
        return None
    if plan.simulated:  # with a budget of its own: what the search has left may be nothing
        own = problem.budget.apart()
        lean = simulated(replace(problem, budget=own), lean, plan.seconds)
        problem.budget.count += own.count
    return lean if _fits(problem, lean) else None


def _charged(problem: Problem, plan: Evaluation) -> Evaluation:
    layer_costs, tensors = problem.layer_costs, []
    for stage, memory in zip(plan.stages, plan.price.memory, strict=True):
        # Searches count some communicators among a stage's buffers.
        counted = layer_costs.of_tensors.footprint(stage).buffer_bytes - layer_costs.footprint(stage).buffer_bytes
        tensors.append(memory.model_copy(update={"buffers_bytes": memory.buffers_bytes - int(counted)}))
    charged = with_overheads(layer_costs, plan.stages, tensors, plan.price.workers)
    return replace(plan, price=replace(plan.price, memory=charged))
