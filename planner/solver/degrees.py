"""Plans whose stages divide their layers over ranks (tensor parallelism), beside replicas, sharding and recomputation.

All stages of a plan have groups of one size. So a plan is a plan for a cluster of groups, and for each size there is
the whole search.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from planner.errors import InfeasibleError, InputError, PlannerError
from planner.plan.blocks import block_ends
from planner.solver.methods import cut_after
from planner.solver.problem.infeasible import UnexplainedError
from planner.solver.problem.problem import Answer, Problem
from planner.solver.problem.result import Found
from planner.solver.search.pipeline_search import PipelineSearch


def solve_degrees(problem: Problem, answer: Answer) -> Found:
    """Find the best plan of one of the degrees that the rules allow; `answer` divides no layers."""
    degrees = problem.rules.tensor
    if degrees == (1,):
        return answer(problem)
    found = list[Found]()
    obstacles = list[PlannerError]()
    missed = list[int]()  # degrees that were not searched

    def apart(share: float) -> Problem:
        """Return the problem with part of the time and a budget of its own: the same stages are other plans."""
        return replace(problem, budget=replace(budget.apart(), deadline=budget.deadline.earlier(share)))

    budget = problem.budget
    # The more promising degrees are searched first, because others may not be worth a search then.
    least_s = {degree: PipelineSearch(problem.on_groups_of(degree)).relaxed_s() for degree in degrees}
    order = degrees if problem.schedule.asynchronous else sorted(degrees, key=lambda degree: least_s[degree])
    for number, degree in enumerate(order):
        best_s = min((each.best.counted_s for each in found), default=math.inf)
        if found and (best_s < least_s[degree] or problem.deadline.passed):
            missed.append(degree)
            continue
        left = len(degrees) - number
        own = apart(1 / (left if problem.schedule.asynchronous else min(left, 2)))
        try:
            alone = answer(replace(own.on_groups_of(degree), hopeless_s=best_s))
        except InputError:
            raise
        except PlannerError as error:
            obstacles.append(error)
            missed += [] if isinstance(error, InfeasibleError) else [degree]
        else:
            found.append(replace(alone, best=alone.best.divided(degree)))
        budget.count += own.budget.count
        budget.exhausted &= own.budget.exhausted
    if not found:
        raise _obstacle(obstacles)
    best = min((each.best for each in found), key=lambda plan: (plan.counted_s, plan.gpus))
    bound_s, bound_of = min(each.bound_s for each in found), max(each.bound_of for each in found)
    for degree in missed:
        own = problem.on_groups_of(degree)
        if bound_of:  # then the others' bounds are of plans that cut between blocks
            own = cut_after(own, block_ends(problem.layer_costs.profile))
        bound_s = min(bound_s, PipelineSearch(own).relaxed_s())
    return Found(best, bound_s, bound_of=bound_of)


def _obstacle(errors: Sequence[PlannerError]) -> PlannerError:
    """Return the error that says most of why no degree has a plan: too little time, or what needs the least memory."""
    unknown = [error for error in errors if not isinstance(error, InfeasibleError)]
    unexplained = [error for error in errors if isinstance(error, UnexplainedError)]
    if unknown or not unexplained:
        return unknown[0] if unknown else errors[0]
    return UnexplainedError(
        lambda: min((error.explanation() for error in unexplained), key=lambda error: error.least_bytes)
    )
