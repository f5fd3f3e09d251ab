"""Plans whose stages divide their layers over ranks (tensor parallelism), beside replicas, sharding and recomputation.

With groups of one size in all stages, a plan is a plan for a cluster of groups: for each size there is the whole
search. Stages with groups of several sizes are sought on clusters of one level, under asynchronous schedules
(`planner.solver.search.chain.mixed_degrees`); elsewhere they only count for the bound.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from planner.cost.recomputation import exact_everywhere
from planner.errors import InfeasibleError
from planner.plan.blocks import block_ends
from planner.solver.evaluate.evaluation import fastest, priced
from planner.solver.methods import cut_after
from planner.solver.problem.bounds import least_times
from planner.solver.problem.budget import OutOfTimeError
from planner.solver.problem.problem import Answer, Problem
from planner.solver.problem.result import Found, stages_along
from planner.solver.problem.states import Chain, StateSpace
from planner.solver.relaxed_steps import solve_with_room
from planner.solver.search.chain.fewest import FEW_STATES
from planner.solver.search.chain.mixed_degrees import MixedDegrees
from planner.solver.search.chain.search import Search
from planner.solver.search.graph.downsets import Downsets, enumerate_downsets
from planner.solver.search.pipeline_search import PipelineSearch


def solve_degrees(problem: Problem, answer: Answer) -> Found:
    """Find the best plan whose stages have the degrees that the rules allow; `answer` divides no layers."""
    degrees, mixes = problem.rules.tensor, _mixes(problem)
    if degrees == (1,):
        return answer(problem)
    found, obstacle = list[Found](), None

    def apart(share: float) -> Problem:
        """Return the problem with part of the time and a budget of its own: the same stages are other plans."""
        return replace(problem, budget=replace(budget.apart(), deadline=budget.deadline.earlier(share)))

    budget = problem.budget
    for number, degree in enumerate(degrees):
        own = apart(1 / (len(degrees) + mixes - number))
        try:
            alone = answer(own.on_groups_of(degree))
        except InfeasibleError as error:
            obstacle = error
        else:
            found.append(replace(alone, best=alone.best.divided(degree)))
        budget.count += own.budget.count
        budget.exhausted &= own.budget.exhausted
    if mixes:
        own = apart(1.0)
        with suppress(InfeasibleError):
            found.append(solve_with_room(own, lambda each: _mixed(each, found)))
        budget.count += own.budget.count
    if not found:
        assert obstacle is not None
        raise obstacle
    best = min((each.best for each in found), key=lambda plan: (plan.counted_s, plan.gpus))
    # Plans that no search looked at count for the bound, too.
    relaxed_s = relaxed_seconds(problem) if len(degrees) > 1 and not mixes else best.seconds
    return Found(best, min(relaxed_s, *(each.bound_s for each in found)))


def _mixes(problem: Problem) -> bool:
    """Return whether there is a search for plans whose stages have several degrees."""
    setting, profile = problem.setting, problem.layer_costs.profile
    alike = not problem.cluster.kinds and len(problem.cluster.joined) == 1
    plain = problem.constraints.empty and problem.rules.max_stages is None and not profile.tied_parameters
    plain &= problem.solver != "ilp" and not problem.vertical_sync
    searched = problem.schedule.asynchronous and problem.simulates and setting.chunks == 1
    return len(problem.rules.tensor) > 1 and alike and plain and searched


def _mixed(problem: Problem, known: Sequence[Found]) -> Found:
    """Find the best plan, or return the best one that is known, with the bound of all."""
    layer_costs, below_s = problem.layer_costs, np.inf
    ends = frozenset[int]() if problem.rules.granularity == "layer" else block_ends(layer_costs.profile)
    within = cut_after(problem, ends) if ends else problem
    spaces = cuts_by_degree(within)
    best = min((each.best for each in known), key=lambda plan: plan.counted_s, default=None)
    if best is not None:
        below_s = min(each.best.price.cost_model_s or each.best.seconds for each in known)
    path, exact, model = None, False, problem.asynchronous()
    with suppress(OutOfTimeError):
        if not known:
            below_s = max(Search(each, model, problem.limits).any_time_s() for each in spaces.values())
        search = MixedDegrees(spaces, model, problem.limits)
        path = search.best(below_s)
        exact = not (search.interrupted or ends) and all(
            space.complete and exact_everywhere(space.layer_costs) for space in spaces.values()
        )
    if path is not None:
        mixed = fastest(problem, [priced(problem, stages_along(next(iter(spaces.values())), path))])
        below_s = min(below_s, path.seconds)
        best = mixed if best is None or mixed.saves(best) else best
    if best is None:
        raise InfeasibleError("no plan fits the memory, however its layers are divided", hint="give more GPUs")
    return Found(best, below_s if exact else relaxed_seconds(problem))


def cuts_by_degree(problem: Problem) -> dict[int, StateSpace]:
    """Return the cuts that plans may have, by degree."""
    costs = {degree: problem.layer_costs.at_degree(degree) for degree in problem.rules.tensor}
    words = None if problem.keeps_order else enumerate_downsets(problem.layer_costs, FEW_STATES)
    if words is None:
        return {degree: Chain(each) for degree, each in costs.items()}
    order = Downsets(problem.layer_costs, words, complete=True).order
    return {degree: Downsets(each, words, complete=True, order=order) for degree, each in costs.items()}


def relaxed_seconds(problem: Problem) -> float:
    """Return a time that no plan is below, whatever its degrees: balanced, and each layer at the best of them."""
    every = [problem.layer_costs.at_degree(degree) for degree in problem.rules.tensor]
    weights: list[Sequence[float]] = [[1] * len(every)]
    if problem.schedule.asynchronous or problem.microbatches >= problem.cluster.gpus:
        # By the GPUs' seconds; in the first one, by those of one microbatch.
        weights.append(problem.rules.tensor)
    return max(PipelineSearch(problem.with_profile(least_times(every, each))).relaxed_s() for each in weights)
