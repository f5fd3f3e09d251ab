"""One problem, one portfolio: proposers yield candidates, the pool evaluates them, local search
improves the best.

attempts    what searches are asked in place of the problem, because they cannot know all of it
proposers   `planner.solver.propose`: regular plans, the exact search along a chain, levels,
            mixed GPUs, ...
pool        price, then simulation: `planner.solver.pool`
improve     local search from the best plans
"""

import math
from collections.abc import Iterator
from itertools import islice

from planner.cost.price_with_copies import price_with_copies
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.formats.files import replace
from planner.solver.attempts import Attempt, Proposer, attempts
from planner.solver.clock import OutOfTimeError, no_plan_yet
from planner.solver.evaluate.leaner import Leaner
from planner.solver.improve.improvement import improve, least_late
from planner.solver.pool import Batch, Pool
from planner.solver.problem.bounds import balanced_s, relaxed_s
from planner.solver.problem.budget import Budget
from planner.solver.problem.cut_space import SearchedCuts, searched_cuts
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Answer, Evaluation
from planner.solver.problem.states import Chain
from planner.solver.propose.regular import regular_plans
from planner.solver.search.pipeline_search import PipelineSearch


def best_plan(problem: Problem) -> Answer:
    """Find the best plan of a problem, whose cuts and groups of ranks are settled.

    Raises:
        InfeasibleError: if no plan fits the memory.
        PlannerError: if the deadline passes before any plan is found.
        InputError: for what no search takes.
    """
    cuts = searched_cuts(problem)
    pool = Pool(problem, _bound_s(problem, cuts), cuts, _anywhere_s(problem, cuts))

    # 1. A few regular plans: there is an answer then if time ends, searches look for nothing
    #    slower, and their gradients may be less late than those of the fastest plan.
    regular = _regular(pool.unhurried())
    _take_first(pool, regular)

    # 2. What searches propose, the other regular plans, and where nothing fits yet, any plan.
    obstacle = _search(pool)
    pool.simulate_best()
    pool.consider_regular(regular)
    if pool.best is None:
        for batch in _any_plan(problem):
            pool.consider(batch)
    if pool.best is None:
        raise _copies_obstacle(pool) or obstacle or no_plan_yet(problem.clock)

    # 3. Plans near the best.
    if not pool.hopeless:
        improve(pool)
        least_late(pool)

    return pool.answer()


def _search(pool: Pool) -> PlannerError | None:
    """Let searches propose candidates; return why the last one had none, if it had none."""
    obstacle: PlannerError | None = None
    for number, attempt in enumerate(attempts(pool)):
        pool.relaxed = attempt.relaxation
        for proposer in attempt.proposers:
            obstacle = _propose(pool, attempt, proposer) or obstacle

        # Of the problems that follow the first one some make no sense, and have no candidates.
        if number == 0 and isinstance(obstacle, InputError) and not pool.usable:
            raise obstacle
        if pool.problem.clock.passed:
            break

    return obstacle


def _propose(pool: Pool, attempt: Attempt, proposer: Proposer) -> PlannerError | None:
    """Evaluate what a proposer yields; return why it has no candidates, if it has none."""
    try:
        for batch in proposer.propose(attempt.problem, pool):
            pool.consider(batch, proposer.method)
    except OutOfTimeError:
        pool.problem.budget.exhausted = False
        return no_plan_yet(pool.problem.clock)
    except (InfeasibleError, InputError) as error:
        return error

    return None


def _copies_obstacle(pool: Pool) -> InfeasibleError | None:
    """Return the error for copies of tied weights that do not fit."""
    problem = pool.problem
    plan = pool.untrained
    if plan is None:
        return None

    try:
        price_with_copies(problem.layer_costs, plan.stages, plan.price, problem.setting)
    except InfeasibleError as error:
        return error

    return None


def _regular(problem: Problem) -> Iterator[Evaluation]:
    """Yield the regular plans, where they are of use: chunks lie apart, and a program that was
    asked for answers.
    """
    if problem.schedule.chunked or problem.solver == "ilp":
        return
    yield from regular_plans(problem)


def _take_first(pool: Pool, regular: Iterator[Evaluation]) -> None:
    """Evaluate the first regular plans, of which the quick ones are simulated."""
    tuning = pool.problem.tuning.portfolio
    pool.consider_regular(islice(regular, tuning.first_plans), tuning.quick_forwards)


def _bound_s(problem: Problem, cuts: SearchedCuts) -> float:
    """Return seconds per minibatch that no plan with the searched cuts is below, before anything is
    searched.
    """
    if problem.schedule.chunked:
        return 0.0  # the search has a bound of its own
    if problem.schedule.splits_backward:
        return balanced_s(problem.layer_costs, problem.setting)
    return relaxed_s(problem, cuts.space)


def _anywhere_s(problem: Problem, cuts: SearchedCuts) -> float:
    """Return seconds that no plan is below whatever its cuts, where it may have others than those
    searched.
    """
    if not cuts.improved:
        return math.inf
    return relaxed_s(problem)


def _any_plan(problem: Problem) -> Iterator[Batch]:
    """Yield a plan of stages as large as their memory allows: one walk over some of the cuts.

    This is what is left to do when the time is over, so it does not end with it, and takes none for
    choices of what recomputes.
    """
    memory_bytes = problem.cluster.memory_bytes
    if memory_bytes is None or problem.schedule.chunked:
        return

    rules = problem.rules
    if rules.recompute == "auto":
        rules = replace(rules, recompute="blocks")
    tuning = problem.tuning
    unhurried = replace(problem, budget=Budget(tuning=tuning.budget), rules=rules)

    chain = Chain(problem.layer_costs)
    some = chain.only(chain.spread(tuning.propose.most_any_plan_cuts))
    plan = PipelineSearch(unhurried, some).fits(problem.cluster.gpus, memory_bytes)
    if plan is None:
        return

    lean = Leaner(problem).lean_enough(plan.stages)
    yield [plan.stages if lean is None else lean.stages]
