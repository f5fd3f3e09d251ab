"""A plan, simulated: every event of a run, worker by worker and link by link."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.cost.asynchronous import ASYNCHRONOUS
from planner.errors import InputError
from planner.formats.plan import Plan
from planner.formats.timeline import Event, Events, Timeline
from planner.schedule.shape import check_accumulate, deadlock, shape_of
from planner.simulator.engine import Engine
from planner.simulator.memory import memory_curves
from planner.simulator.pipeline import steady_minibatches, steady_s
from planner.simulator.times import Pipeline, StageTimes, pipeline_with

FEWEST = 16  # minibatches of schedules that drain that are simulated where nobody says how many


def simulate(plan: Plan, minibatches: int | None = None, accumulate: int = 1) -> Timeline:
    """Run `plan` without running anything: the same instruction streams as in training, at the plan's times.

    Args:
        plan: from `solve` or `load_plan`.
        minibatches: how many; enough for a steady state when None.
        accumulate: minibatches per replica between two updates, under 1f1b, as in `TrainingOptions`.

    Raises:
        InputError: for a number of minibatches that makes no sense, and for a schedule that does not accumulate so.
        PlanError: for a plan whose depths let its workers wait for each other for ever.
    """
    check_accumulate(plan, accumulate)
    count = default_minibatches(plan, accumulate) if minibatches is None else minibatches
    if count < 1:
        raise InputError(f"{count} minibatches are no run", hint="give `minibatches` 1 or more")
    events: list[Event] = []
    engine = Engine(pipeline_of(plan, accumulate), count, events)
    if not engine.run():
        raise deadlock(plan)
    rows = Events.of(events)
    memory = memory_curves(plan, rows.rows())
    links = engine.carrier.links.uses([rank for stage in plan.stages for rank in stage.ranks])
    return Timeline.of_plan(plan, "simulated", count, rows, accumulate=accumulate, memory=memory, links=tuple(links))


def simulated_s(plan: Plan, accumulate: int = 1) -> float:
    """Seconds per minibatch in the steady state of `plan`, as `simulate` has them, without its events.

    Raises:
        InputError, PlanError: as `simulate`.
    """
    check_accumulate(plan, accumulate)
    seconds = steady_s(pipeline_of(plan, accumulate))
    assert seconds is not None
    if math.isinf(seconds):
        raise deadlock(plan)
    return seconds


def default_minibatches(plan: Plan, accumulate: int = 1) -> int:
    """Enough for a steady state, and to see how the run begins and ends."""
    count = steady_minibatches(replace(shape_of(plan), accumulate=accumulate))
    return count if plan.schedule in ASYNCHRONOUS else max(count, FEWEST)


def pipeline_of(plan: Plan, accumulate: int = 1) -> Pipeline:
    """The plan as the simulation sees it."""
    shape = replace(shape_of(plan), accumulate=accumulate)
    stages = [
        StageTimes(
            s.forward_s, s.backward_s, s.update_s, s.forward_s if s.recompute else 0.0, s.accumulate_s, s.ready_s
        )
        for s in plan.stages
    ]
    own_bytes = [s.memory.gradients_bytes - _received_bytes(plan, number) for number, s in enumerate(plan.stages)]
    return pipeline_with(shape, plan.cluster, stages, plan.transfers, own_bytes, plan.shared)


def _received_bytes(plan: Plan, stage: int) -> int:
    """What the memory for gradients holds of other stages': those of weights that an earlier stage has, too."""
    seen: set[str] = set()
    received = 0
    for shared in plan.shared:
        if shared.stages[1] == stage and not seen.issuperset(shared.weights):
            seen.update(shared.weights)
            received += shared.gradient_bytes
    return received
