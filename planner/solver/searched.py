"""Search for the best plan, beside plans that take no search."""

from __future__ import annotations

from planner.errors import InfeasibleError
from planner.solver.candidates.alternatives import fastest_simulated
from planner.solver.candidates.first_plans import FirstPlans
from planner.solver.candidates.improvement import improved
from planner.solver.problem.budget import OutOfTimeError
from planner.solver.problem.infeasible import UnexplainedError, explain, out_of_time
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Found
from planner.solver.search.pipeline_search import PipelineSearch


def searched(problem: Problem) -> Found:
    """Find the best plan with one stage per worker, no slower than those that take no search.

    Raises:
        InfeasibleError: if no plan fits the memory.
        PlannerError: if the deadline passes before any plan is found.
    """
    first = FirstPlans(problem)
    if problem.deadline.at_s is not None:
        first.evaluate()
    try:
        found = _by_search(problem)
    except OutOfTimeError:
        if not problem.deadline.passed:
            first.evaluate()
        last_resort = first.last_resort()
        if last_resort is None:
            raise out_of_time(problem, first.leanest()) from None
        problem.budget.exhausted = False
        found = Found(last_resort, PipelineSearch(problem).relaxed_s())
    except InfeasibleError:
        first.evaluate()  # these have stages that the search does not
        if first.best is None or not problem.simulates:
            raise
        found = Found(first.best, PipelineSearch(problem).relaxed_s())
    return improved(problem, first.at_least(found)) if problem.simulates else found


def _by_search(problem: Problem) -> Found:
    """Search for the best plan: by the cost model first, then by simulation.

    Raises:
        InfeasibleError: if no plan fits the memory.
        OutOfTimeError: if the deadline passes before any plan is found.
    """
    search = PipelineSearch(problem)
    path = search.best()
    # Other cuts than those along the order may need less memory; only imported profiles may use them.
    if path is None and not problem.keeps_order and (wider := search.over_all_cuts()) is not None:
        search, path = wider, wider.best()
    if path is None:
        raise UnexplainedError(lambda: explain(problem, search.fits, search.leaner()))
    extended = search.extended(path)
    assert extended.path is not None
    best = PipelineSearch(problem, extended.space).priced(extended.path)
    # The bound comes from the search and the seconds from the price, which add the same numbers in another order.
    bound_s = min(extended.bound_s, best.seconds)
    if not problem.simulates:
        return Found(best, bound_s)
    columned = search.columned(path, extended, best)
    bound_s = min(bound_s, columned.bound_s)
    return Found(fastest_simulated(search, [best, *columned.plans], bound_s), bound_s)
