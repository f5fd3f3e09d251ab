"""Integer programs for what the exact search cannot express, and to check it.

`ilp_flow` has the formulation: stages between cuts, with replicas, memory, every schedule, GPUs of several kinds, and
pins.
"""

from __future__ import annotations

from dataclasses import replace

from planner.cost.rounding import SLACK
from planner.errors import InputError
from planner.solver.bounds.balance import balanced_s
from planner.solver.candidates.deadline import Deadline
from planner.solver.integer.ilp_columns import Columns
from planner.solver.integer.ilp_flow import Flow
from planner.solver.integer.milp import MilpName, installed
from planner.solver.integer.request import IlpAnswer, Request, ranked

_MOST_STATES_FOR_A_BOUND = 300


def solve_ilp(request: Request, deadline: Deadline, solver: MilpName | None = None) -> IlpAnswer | None:
    """The fastest plan that respects the request's constraints, or None when there is none.

    Args:
        request: for a cluster of one level.
        deadline: when it passes, the best plan so far and a bound.
        solver: HiGHS when installed, else CBC, when None.

    Raises:
        InputError: for what no integer program here expresses, and for questions that are too large.
        TimeoutError: when the deadline passes before there is any plan.
    """
    refuse(request)
    solver = solver or installed()[0]
    columns = Columns(request, all_cuts=not request.keeps_order)
    answer = Flow(request, columns, solver).solve(deadline)
    if answer is None:
        return None
    if not columns.space.complete:  # other cuts of a model that keeps its order only bound what is possible
        bound_s = min(answer.bound_s, _over_all_cuts_s(request, deadline, solver))
        answer = replace(answer, bound_s=bound_s, optimal=answer.optimal and bound_s >= answer.seconds * (1 - SLACK))
    return replace(answer, stages=ranked(request, answer.stages))


def _over_all_cuts_s(request: Request, deadline: Deadline, solver: MilpName) -> float:
    """A time that no plan over any cuts of the graph beats."""
    columns = Columns(request, all_cuts=True)
    if not columns.space.complete or len(columns.states) > _MOST_STATES_FOR_A_BOUND:
        return balanced_s(request.layer_costs.everything, request.setting)
    try:
        answer = Flow(request, columns, solver).solve(deadline)
    except TimeoutError:
        return balanced_s(request.layer_costs.everything, request.setting)
    assert answer is not None  # the plans along the order are among them
    return answer.bound_s


def refuse(request: Request) -> None:
    """Refuse what no integer program here expresses.

    Raises:
        InputError: saying what.
    """
    constraints, cluster = request.constraints, request.cluster
    if len(cluster.joined) > 1:
        raise InputError(
            f"the integer program prices clusters of one level, not of {len(cluster.joined)}",
            hint="use `solver=search`, or give `gpus` and the bandwidth of the slowest level",
        )
    if constraints.gpu_of and not cluster.kinds:
        name, rank = next(iter(constraints.gpu_of.items()))
        raise InputError(
            f"layer '{name}' cannot be pinned to GPU {rank} of a cluster whose GPUs are all alike",
            hint="pin it to a stage, or give the cluster's kinds in cluster.json",
        )
