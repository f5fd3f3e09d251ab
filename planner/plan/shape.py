"""Turn a plan into the shape that schedules work on, and check that they can."""

import math
from collections.abc import Sequence
from itertools import count

from planner.errors import InputError, PlanError
from planner.formats.plan import Plan
from planner.formats.plan_parts import Shared
from planner.formats.profile import LossMean
from planner.schedule.schedule import Channel, PipelineShape, Schedule


def shape_of(plan: Plan) -> PipelineShape:
    """Return what a schedule asks of a plan: its ranks, channels and depths, without times."""
    return PipelineShape(
        ranks=tuple(stage.ranks for stage in plan.stages),
        channels=tuple(Channel(t.source, t.target, t.gradient_bytes > 0) for t in plan.transfers),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        depths=tuple(stage.in_flight for stage in plan.stages),
        shared=trainable_pairs(plan.shared, plan.replicas, plan.schedule),
    )


def check_divided_loss(
    model: str,
    loss: LossMean | None,
    schedule: Schedule,
    microbatches: int,
    *,
    accepted: bool = False,
) -> None:
    """Raise InputError where a schedule divides minibatches whose loss was not seen to be that of
    their parts.

    That is a loss of whole batches, or one of which the profile could not tell. The user may accept
    the mean of the microbatches' losses in its place.
    """
    if loss is None or loss.divisible or loss.accepted or accepted:
        return
    if microbatches == 1 or not schedule.divides:
        return

    other = "use `microbatches=1`, or `schedule=1f1b`"
    mean = "or take the mean over microbatches with `accept_divided_loss`"
    if loss.over == "unchecked":
        raise InputError(
            f"what the loss of '{model}' is a mean over is not known: {loss.reason}; so the "
            f"{microbatches} "
            f"microbatches into which {schedule} splits a minibatch may train on another loss",
            hint=f"{other}; define loss_weight(target) in the model file and profile it again; "
            f"{mean}",
        )

    raise InputError(
        f"the loss of '{model}' is not a mean over samples or labels, so the {microbatches} "
        f"microbatches into which "
        f"{schedule} splits a minibatch train on another loss",
        hint=f"{other}; if the loss is a mean over some of the labels, define loss_weight(target) "
        f"in the model file "
        f"and profile it again; {mean}",
    )


def trainable_pairs(
    shared: Sequence[Shared], replicas: Sequence[int], schedule: Schedule
) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages that share weights; none where the replicas keep the schedule from
    training them.
    """
    pairs = tuple(each.stages for each in shared)
    uneven = schedule.stashes and any(
        len({replicas[stage] for stage in pair}) > 1 for pair in pairs
    )
    return () if uneven else pairs


def check_versions(
    schedule: Schedule, microbatches: int, replicas: Sequence[int], depths: Sequence[int]
) -> None:
    """Raise PlanError where a stage needs more versions of weights for its units in flight than the
    schedule keeps.
    """

    def suffice(number: int) -> bool:
        return all(
            schedule.versions_suffice(number, *stage)
            for stage in zip(replicas, depths, strict=True)
        )

    if not suffice(microbatches):
        least = next(number for number in count(microbatches) if suffice(number))
        raise PlanError(
            f"{microbatches} microbatches per minibatch are too few for stages with in_flight "
            f"{list(depths)} on "
            f"{list(replicas)} replicas under {schedule}: they would need more than its "
            f"{schedule.weight_versions} "
            "versions of the weights",
            hint=f"take {least} `microbatches` or more, or fewer stages",
        )


def deadlock(plan: Plan) -> PlanError:
    """Return the error of a plan whose depths make its stages wait for each other."""
    depths = [stage.in_flight for stage in plan.stages]
    return PlanError(
        f"the plan's stages wait for each other for ever: in_flight {depths} cannot feed "
        f"'{plan.config}'",
        hint=f"make the plan again with plan solve, or take a multiple of "
        f"{math.lcm(*plan.replicas)} `microbatches`",
    )
