"""Simulate a plan: every event of a run, worker by worker and link by link."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.errors import InputError
from planner.formats.groups import of_groups
from planner.formats.plan import Plan
from planner.formats.plan_shape import check_accumulate, deadlock, shape_of
from planner.formats.timeline import Event, Events, Timeline
from planner.simulator.memory import memory_curves
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady_time import steady_minibatches, steady_s

FEWEST = 16  # minibatches of a synchronous schedule, by default
_ENOUGH_UNITS = 16_000  # of work, a microbatch at a stage each, that are enough to look at


def simulate(plan: Plan, minibatches: int | None = None, accumulate: int = 1) -> Timeline:
    """Simulate the instruction streams of training with `plan`, at the plan's times. A group of ranks is one worker.

    Args:
        plan: from `solve` or `load_plan`.
        minibatches: to simulate; None for enough to reach a steady state.
        accumulate: minibatches per replica between two updates, under 1f1b, as in `TrainingOptions`.

    Raises:
        InputError: for a number of minibatches below 1, and for a schedule that cannot accumulate over minibatches.
        PlanError: for a plan whose depths let its workers wait for each other for ever.
    """
    check_accumulate(plan, accumulate)
    costs, plan = costs_of(plan, accumulate), of_groups(plan)
    count = default_minibatches(plan, accumulate) if minibatches is None else minibatches
    if count < 1:
        raise InputError(f"`minibatches={count}` is no run", hint="give `minibatches` 1 or more")
    events: list[Event] = []
    simulation = Simulation(costs, count, events)
    if not simulation.run():
        raise deadlock(plan)
    rows = Events.of(events)
    memory = memory_curves(plan, rows.rows())
    links = simulation.communication.links.uses([rank for stage in plan.stages for rank in stage.ranks])
    return Timeline.of_plan(plan, "simulated", count, rows, accumulate=accumulate, memory=memory, links=tuple(links))


def simulated_s(plan: Plan, accumulate: int = 1) -> float:
    """Compute the seconds per minibatch in the steady state of `plan`, as `simulate` does, without recording events.

    Raises:
        InputError, PlanError: as `simulate`.
    """
    check_accumulate(plan, accumulate)
    seconds = steady_s(costs_of(plan, accumulate))
    assert seconds is not None
    if math.isinf(seconds):
        raise deadlock(plan)
    return seconds


def default_minibatches(plan: Plan, accumulate: int = 1) -> int:
    """Return enough minibatches for a steady state, and to see how the run starts and ends."""
    count = steady_minibatches(replace(shape_of(plan), accumulate=accumulate))
    if plan.schedule.asynchronous:
        return count
    return max(count, min(FEWEST, _ENOUGH_UNITS // (plan.microbatches * len(plan.stages))))


def costs_of(plan: Plan, accumulate: int = 1) -> PipelineCosts:
    """Return the plan's pipeline and its costs, as a simulation takes them."""
    degrees, plan = plan.degrees, of_groups(plan)
    shape = replace(shape_of(plan), accumulate=accumulate)
    stages = [
        StageCosts(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            update_s=stage.update_s,
            recompute_s=stage.again_s,
            accumulate_s=stage.accumulate_s,
            ready_s=stage.ready_s,
            ready_shares=stage.ready_shares,
            late_s=stage.late_s,
            gradient_bytes=stage.memory.gradients_bytes - _received_bytes(plan, number),
            sharded=stage.sharded,
        )
        for number, stage in enumerate(plan.stages)
    ]
    return PipelineCosts.of(shape, plan.cluster, stages, plan.transfers, plan.shared, degrees)


def _received_bytes(plan: Plan, stage: int) -> int:
    """Sum the gradients that a stage receives of weights shared with earlier stages.

    They are part of the stage's memory for gradients, but not of its all-reduce.
    """
    seen: set[str] = set()
    received = 0
    for shared in plan.shared:
        if shared.stages[1] == stage and not seen.issuperset(shared.weights):
            seen.update(shared.weights)
            received += shared.gradient_bytes
    return received
