"""Propose the best plan of an integer program: where one was asked for, or where GPUs of several
kinds are few.
"""

from collections.abc import Iterator

from planner.errors import InfeasibleError, InputError, PlannerError
from planner.solver.pool import Batch, Pool
from planner.solver.problem.bounds import relaxed_s
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain
from planner.solver.search.integer.ilp import solve_by_program


def check_solver(problem: Problem) -> None:
    """Raise InputError if no method takes the problem."""
    if not problem.schedule.chunked:
        return
    wants = ""
    if problem.cluster.kinds:
        wants = "GPUs of several kinds"
    elif problem.solver == "ilp":
        wants = "`solver=ilp`"
    if wants:
        raise InputError(
            f"the schedule {problem.schedule} is solved by the search alone, which does not take "
            f"{wants}",
            hint="use another schedule, or leave them out",
        )


def propose_program(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan; raise the pool's bound.

    Raises:
        InfeasibleError: if there is none.
        InputError: for what no program expresses.
        PlannerError: if the deadline passes before any plan is found.
    """
    answer = solve_by_program(problem)
    bound_s = answer.bound_s
    if problem.sharding.gradients:  # no column divides gradients and weights
        bound_s = min(bound_s, relaxed_s(problem, Chain(problem.layer_costs)))
    pool.raise_bound(bound_s)
    yield [answer.stages]


def propose_small_program(problem: Problem, pool: Pool) -> Iterator[Batch]:
    """Yield the best plan of a small program, and nothing where a program is too large, or time
    ends before.
    """
    cluster = problem.cluster
    columns = len(problem.layer_costs.profile.layers) ** 2 * cluster.gpus * 2 ** len(cluster.kinds)
    too_many = columns > problem.tuning.propose.most_program_columns
    if problem.solver != "auto" or len(cluster.joined) > 1 or too_many:
        return
    try:
        yield from propose_program(problem, pool)
    except InfeasibleError:
        raise
    except PlannerError:
        # Too large, or too little time: the search has proposed plans, or says itself why there is
        # none.
        return
