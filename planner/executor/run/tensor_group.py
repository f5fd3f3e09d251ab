"""The ranks that divide a worker's layers with it, as its plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.formats.plan import Plan

if TYPE_CHECKING:
    from planner.model.tensor.group import TensorGroup


def tensor_group(plan: Plan, rank: int) -> TensorGroup | None:
    """Return the group of ranks that divides a worker's layers; None where each is whole on a rank.

    Raises:
        PlanError: for divided layers that the executor does not run.
    """
    check_divided(plan)
    own = next(stage for stage in plan.stages if rank in stage.ranks)
    if own.tensor == 1:
        return None
    from planner.model.tensor.group import TensorGroup  # with DTensor, whose import takes a second

    return TensorGroup(own.tensor, own.ranks.index(rank) % own.tensor)


def check_divided(plan: Plan) -> None:
    """Check that the executor can divide layers as a plan says.

    Raises:
        PlanError: when it cannot.
    """
    if max(plan.degrees) == 1:
        return
    problem = None
    one = f"solve with one degree, `tensor={max(plan.degrees)}`"
    if len({(stage.ranks, stage.tensor) for stage in plan.stages}) > len({stage.ranks for stage in plan.stages}):
        problem = "stages on the same ranks whose groups have different sizes", one
    elif any(len({plan.stages[stage].tensor for stage in shared.stages}) > 1 for shared in plan.shared):
        problem = "stages that share a weight and whose groups have different sizes", one
    elif plan.cluster.sequence_parallel:
        problem = "sequence parallelism", "it is priced alone: solve without `sequence_parallel`"
    elif plan.compiled:
        problem = "divided layers that are compiled", "profile without `compile`, or solve with `tensor=1`"
    if problem is not None:
        raise PlanError(f"the executor does not run {problem[0]}, as '{plan.config}' has them", hint=problem[1])
