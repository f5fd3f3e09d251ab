"""One request, one search: the fastest plan under one schedule, with nothing beside it.

`planner.solver.solve` asks it for the candidates of an answer; `planner.solver.answer` has the
search.
"""

import time
from collections.abc import Sequence

from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.option import keywords_of
from planner.options.solving import SolveOptions
from planner.solver.answer import answer
from planner.solver.assemble import complete
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.evaluate.pipelines import too_large
from planner.solver.problem.bounds import relaxed_s
from planner.solver.problem.budget import Budget
from planner.solver.problem.infeasible import UnexplainedError
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer
from planner.solver.report import report_of
from planner.solver.request import Request, searched_problem


def find_plan(request: Request) -> Plan:
    """Find the fastest plan.

    Raises:
        UnexplainedError: if no plan fits the memory.
        InputError: for options that make no sense under the schedule.
        PlannerError: if the time ends before there is any plan.
    """
    started = time.perf_counter()
    problem = searched_problem(request, request.budget())

    degrees = problem.rules.tensor
    bound_s = min(relaxed_s(problem.on_groups_of(degree)) for degree in degrees)
    request.clock.progress.begin(request.clock.at_s, bound_s)
    best = _settled(problem, answer(problem))

    report = report_of(problem, best, time.perf_counter() - started)
    accepts = request.options.accept_divided_loss
    plan = complete(problem, best.best, report, accepts_loss=accepts)
    if best.untried_degrees:
        plan = plan.noting(_untried_words(request.profile, best.untried_degrees))
    return plan


@keywords_of(SolveOptions)
def search_plan(profile: Profile, cluster: Cluster, options: SolveOptions) -> Plan:
    """Find the fastest plan under one schedule, with nothing beside it: `find_plan`, with options
    as keywords.

    Raises:
        InfeasibleError: if no plan fits the memory, with the smallest change that makes one fit.
    """
    try:
        return find_plan(Request.of(profile, cluster, options))
    except UnexplainedError as error:
        raise error.explanation() from None


def _untried_words(profile: Profile, degrees: Sequence[int]) -> str:
    """Say what the time did not suffice for: "layers sharded over 4, 8 ranks"."""
    parts = ["whole layers"] if 1 in degrees else []
    of_sequences = {costs.degree for costs in profile.tensor or () if costs.context}
    for what, own in (
        ("layers", [degree for degree in degrees if degree not in of_sequences]),
        ("sequences", [degree for degree in degrees if degree in of_sequences]),
    ):
        divided = [str(degree) for degree in own if degree > 1]
        if divided:
            parts.append(f"{what} sharded over {', '.join(divided)} ranks")
    return f"the time limit ended the search of {' and '.join(parts)}"


def _settled(problem: Problem, found: Answer) -> Answer:
    """Return the answer of a schedule that drains with its simulated time, and divided as little as
    is as fast.

    Without its waiting, which may be half of its time, nobody could compare the plan with others.
    """
    if problem.schedule.formula != "synchronous" or problem.cluster.kinds:
        return found
    seconds = problem.tuning.answer.last_simulation_s
    budget = Budget.last(problem.budget.clock, seconds, problem.tuning.budget)
    last = replace(problem, budget=budget)
    if not (found.best.simulated or too_large(problem, found.best.stages)):
        found = found.with_best(evaluate(last, found.best.stages))
    return plainest(last, found)


def plainest(problem: Problem, found: Answer) -> Answer:
    """Return the answer with replicas of a single stage that divide as little as takes as long, by
    estimates.
    """
    best = found.best
    (stage, *others) = best.stages
    options = stage.options
    if others or options.divides_layers or problem.rules.shard_optimizer == "always":
        return found

    indistinguishable_s = best.seconds * (1 + problem.tuning.answer.indistinguishable_share)
    for sharding in options.sharding.less():
        plainer = replace(stage, options=options.with_sharding(sharding))
        plan = evaluate(problem, [plainer])
        as_fast = plan.simulated == best.simulated and plan.seconds <= indistinguishable_s
        if as_fast and problem.allows(plan):
            return found.with_best(plan)
    return found
