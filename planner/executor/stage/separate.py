"""Refuse a plan whose stages, replicas or ranks would each step parts of what the user's optimizer
combines, or masters of weights that it remembers.
"""

from collections.abc import Sequence

import torch

from planner.errors import PlanError
from planner.formats.plan import Plan
from planner.model.optimizer_part import TrainedParameter, check_scheduler
from planner.model.separable import (
    Separability,
    masters_problem,
    schedule_problem,
    separability,
)
from planner.model.spec import TrainingSpec


def check_separate(
    spec: TrainingSpec,
    plan: Plan,
    whole: Sequence[TrainedParameter],
    parts: Sequence[Sequence[str]],
    device: torch.device,
) -> None:
    """Try the user's optimizer on parameters like the model's, divided as the plan divides them.

    Args:
        whole: all trained parameters of the model.
        parts: the names of those that each stage trains.
        device: where the optimizers will run.

    Raises:
        PlanError: when the optimizer would update the parts otherwise than one process updates all
            parameters.
        ModelFileError: when it communicates in step(), or when scheduler() is of no use to stages.
    """
    if not whole:
        return
    check_scheduler(spec, whole)
    _check_masters(spec, plan, whole, device)
    if plan.workers == 1:
        return

    ways = [parts] if sum(map(bool, parts)) > 1 else []
    # ranks that divide sequences have whole weights
    divides_weights = plan.divides_layers and not plan.divides_sequences
    by_elements = divides_weights or any(stage.shards_optimizer for stage in plan.stages)
    tried = separability(spec, whole, ways, device, by_elements=by_elements)
    _check_optimizer(tried, plan, divided=bool(ways) or by_elements)

    problem = schedule_problem(spec, whole, ways, device, by_elements=by_elements)
    if problem is not None:
        divided, hint = _division(plan)
        raise PlanError(
            f"{divided}, but scheduler() {problem}",
            hint=f"let scheduler() follow the number of steps alone; or {hint}",
        )


def _check_masters(
    spec: TrainingSpec, plan: Plan, whole: Sequence[TrainedParameter], device: torch.device
) -> None:
    """Raise PlanError where the optimizer does not step masters as it steps the weights; what is
    sharded as well is tried in parts.
    """
    if plan.master_weights is None or all(stage.shards_optimizer for stage in plan.stages):
        return
    problem = masters_problem(spec, whole, device)
    if problem is not None:
        raise PlanError(
            f"the optimizer steps masters of weights in {plan.master_weights}, but it {problem}",
            hint="let its hooks and its step() take the parameters from its param_groups, "
            "or profile without `master_weights`",
        )


def _check_optimizer(tried: Separability, plan: Plan, *, divided: bool) -> None:
    """Raise PlanError where the optimizer was seen to be of no use to the plan; `divided`: if it
    divides parameters.
    """
    if tried.problem is None:
        return

    replicated = max(plan.replicas) > 1 or plan.divides_layers
    if tried.draws and replicated:
        raise PlanError(
            f"{tried.kind} {tried.problem}, so replicas of a stage would not stay equal",
            hint="take an optimizer that draws no numbers, or solve for stages of one GPU each",
        )

    if divided and not _accepted(tried):
        raise _inseparable(tried, plan)


def _division(plan: Plan) -> tuple[str, str]:
    """Return what the plan divides, and how to solve for a plan that does not."""
    if len(plan.stages) == 1:
        divided = "the plan shards its parameters over replicas or ranks"
        return divided, "solve with `tensor=1` and `shard_optimizer=never`"
    divided = f"the plan has {len(plan.stages)} stages with an optimizer each"
    return divided, "solve with `max_stages=1`, `tensor=1` and `shard_optimizer=never`"


def _accepted(tried: Separability) -> bool:
    """Return whether the optimizer's own word counts: only where trying it has shown nothing
    against it.
    """
    return tried.claimed and not tried.combines


def _inseparable(tried: Separability, plan: Plan) -> PlanError:
    divided, hint = _division(plan)
    if tried.combines:
        hint += (
            "; for a norm of all gradients there is `clip_grad_norm`, with an optimizer "
            "that does not clip"
        )
    else:
        hint += (
            f"; or, if each parameter is updated by itself, let optimizer() set "
            f"{tried.kind}.separable = True"
        )

    return PlanError(f"{divided}, but {tried.kind} {tried.problem}", hint=hint)
