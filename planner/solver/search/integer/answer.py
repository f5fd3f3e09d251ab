"""Solve a problem by an integer program: which problems need one, and why there may be no plan."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import InfeasibleError, InputError, PlannerError
from planner.options.solving import SolverName
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.problem.budget import Budget
from planner.solver.problem.infeasible import PLENTY, against_constraints, explain
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation, Found
from planner.units import format_bytes


def needs_program(problem: Problem, solver: SolverName) -> bool:
    """Return whether an integer program is to solve the problem, because the search cannot or because it was asked for.

    Raises:
        InputError: if the solver that was asked for cannot solve it.
    """
    wants = _beyond_the_search(problem)
    if problem.schedule.chunked and (wants is not None or solver == "ilp"):
        raise InputError(
            f"the schedule {problem.schedule} is solved by the search alone, which does not take "
            f"{wants or '`solver=ilp`'}",
            hint="use another schedule, or leave them out",
        )
    if solver == "search" and wants is not None:
        raise InputError(f"the search does not take {wants}", hint="use `solver=ilp` or `solver=auto`")
    return solver == "ilp" or wants is not None


def _beyond_the_search(problem: Problem) -> str | None:
    """Return, in words, what the search cannot express; None if it can express the whole problem."""
    constraints = problem.constraints
    if problem.cluster.kinds and (problem.schedule.chunked or len(problem.cluster.joined) > 1):
        return "GPUs of several kinds" + ("" if problem.schedule.chunked else " on several levels")
    if constraints.gpu_of:
        return "layers pinned to a GPU"
    if constraints.stage_of and problem.schedule.chunked:
        return "layers pinned to a stage"
    if problem.with_cuts_forbidden() is None:
        return "layers kept together that are no neighbours in the profile's order"
    return None


def solve_by_program(problem: Problem) -> Found:
    """Find the best plan by an integer program.

    Raises:
        InfeasibleError: if there is none.
        InputError: for what it cannot express, or is too large for it.
        PlannerError: if the deadline passes before any plan is found.
    """
    try:
        found = _found(problem)
    except TimeoutError:
        raise PlannerError(
            "the time limit passed before any plan was found", hint="give a longer `time_limit_s`, or leave it out"
        ) from None
    if found is None:
        raise _infeasible(problem)
    return replace(found, best=evaluate(problem, found.best.stages))


def _found(problem: Problem) -> Found | None:
    # Imported here, because importing PuLP takes time and few problems need it.
    from planner.solver.search.integer.ilp import solve_ilp
    from planner.solver.search.integer.ilp_flow import installed

    solver = installed()[0]
    best = solve_ilp(problem, solver)
    return None if best is None else Found(priced(problem, best.stages), best.bound_s, f"ilp, {solver}")


def _infeasible(problem: Problem) -> InfeasibleError:
    """Return why there is no plan: the constraints, or the memory."""
    cluster = problem.cluster

    def again(**changes: object) -> Evaluation | None:
        """Solve again on a changed cluster, whatever time that takes."""
        found = _found(replace(problem.with_cluster(cluster.model_copy(update=changes)), budget=Budget()))
        return None if found is None else found.best

    def fits(gpus: int, memory_bytes: int) -> Evaluation | None:
        return again(memory_bytes=memory_bytes) if gpus == cluster.gpus else None

    plenty = tuple(kind.model_copy(update={"memory_bytes": PLENTY}) for kind in cluster.kinds)
    # Without a memory limit only the constraints can be the reason.
    unlimited = again(kinds=plenty, memory_bytes=None)
    if unlimited is None:
        return against_constraints(problem)
    if not cluster.kinds:
        return explain(problem, fits, {})
    # The limits are those of the stages' kinds before their memory was changed.
    limits = [cluster.memory_of(cluster.kind_of(stage.ranks[0])) or PLENTY for stage in unlimited.stages]
    held = [memory.total_bytes for memory in unlimited.price.memory]
    over = [total - limit for total, limit in zip(held, limits, strict=True)]
    worst = max(range(len(over)), key=over.__getitem__)
    return InfeasibleError(
        f"no plan fits the memory of the cluster's GPUs: in the fastest without a limit, stage {worst} needs "
        f"{format_bytes(problem.reserve.whole(held[worst]))}, {format_bytes(max(over[worst], 0))} too many",
        hint="give the kinds of GPUs more memory_bytes, or more GPUs",
    )
