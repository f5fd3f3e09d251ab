"""A plan, simulated: every event of a run, worker by worker and link by link."""

from __future__ import annotations

import math

from planner.cost import ASYNCHRONOUS
from planner.errors import InputError, PlanError
from planner.plan_file import Plan
from planner.schedule.shape import deadlock, shape_of
from planner.simulator.engine import Engine
from planner.simulator.memory import memory_curves
from planner.simulator.pipeline import steady_minibatches, steady_s
from planner.simulator.times import Pipeline, StageTimes, pipeline_with
from planner.timeline import Event, Events, Timeline

FEWEST = 16  # minibatches of schedules that drain that are simulated where nobody says how many


def simulate(plan: Plan, minibatches: int | None = None) -> Timeline:
    """Run `plan` without running anything: the same instruction streams as in training, at the plan's times.

    Args:
        plan: from `solve` or `load_plan`.
        minibatches: how many; enough for a steady state when None.

    Raises:
        InputError: for a number of minibatches that makes no sense.
        PlanError: for a plan that no schedule runs, or whose depths let its workers wait for each other for ever.
    """
    _check(plan)
    count = default_minibatches(plan) if minibatches is None else minibatches
    if count < 1:
        raise InputError(f"{count} minibatches are no run", hint="give --minibatches 1 or more")
    events: list[Event] = []
    engine = Engine(pipeline_of(plan), count, events)
    if not engine.run():
        raise deadlock(plan)
    rows = Events.of(events)
    memory = memory_curves(plan, rows.rows())
    links = engine.carrier.links.uses([rank for stage in plan.stages for rank in stage.ranks])
    return Timeline.of_plan(plan, "simulated", count, rows, memory=memory, links=tuple(links))


def simulated_s(plan: Plan) -> float:
    """Seconds per minibatch in the steady state of `plan`, as `simulate` has them, without its events.

    Raises:
        PlanError: as `simulate`.
    """
    _check(plan)
    seconds = steady_s(pipeline_of(plan))
    if math.isinf(seconds):
        raise deadlock(plan)
    return seconds


def default_minibatches(plan: Plan) -> int:
    """Enough for a steady state, and to see how the run begins and ends."""
    count = steady_minibatches(shape_of(plan))
    return count if plan.schedule in ASYNCHRONOUS else max(count, FEWEST)


def pipeline_of(plan: Plan) -> Pipeline:
    """The plan as the simulation sees it."""
    stages = [
        StageTimes(
            s.forward_s, s.backward_s, s.update_s, s.forward_s if s.recompute else 0.0, s.accumulate_s, s.ready_s
        )
        for s in plan.stages
    ]
    own_bytes = [s.memory.gradients_bytes - _received_bytes(plan, number) for number, s in enumerate(plan.stages)]
    return pipeline_with(shape_of(plan), plan.cluster, stages, plan.transfers, own_bytes, plan.shared)


def _received_bytes(plan: Plan, stage: int) -> int:
    """What the memory for gradients holds of other stages': those of weights that an earlier stage has, too."""
    seen: set[str] = set()
    received = 0
    for shared in plan.shared:
        if shared.stages[1] == stage and not seen.issuperset(shared.weights):
            seen.update(shared.weights)
            received += shared.gradient_bytes
    return received


def _check(plan: Plan) -> None:
    if not plan.contiguous:
        raise PlanError(
            "the plan's stages are not contiguous: values go back and forth between them, which no schedule runs",
            hint="make a plan without --not-contiguous",
        )
    if plan.solver.cost_model == "max-load":
        raise PlanError(
            "the plan is for the max-load objective, which has no schedule to simulate",
            hint="make a plan with: plan solve --cost-model resource",
        )
