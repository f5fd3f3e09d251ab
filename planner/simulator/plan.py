"""A plan, simulated: every event of a run, worker by worker and link by link."""

from __future__ import annotations

from planner.cost import ASYNCHRONOUS
from planner.errors import InputError, PlanError
from planner.plan_file import Plan
from planner.schedule.shape import shape_of
from planner.simulator.engine import Engine, StageTimes
from planner.simulator.links import ClusterLinks
from planner.simulator.memory import memory_curves
from planner.simulator.times import with_handling
from planner.timeline import Event, Events, Timeline
from planner.topology import Topology

FEWEST, FEWEST_ASYNCHRONOUS = 16, 48  # minibatches that are simulated where nobody says how many
MOST = 2**17  # the same, times workers


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
    times = stage_times(plan)
    links = ClusterLinks(plan, times)
    if not Engine(shape_of(plan), times, links, count, events).run():
        depths = [stage.in_flight for stage in plan.stages]
        raise PlanError(
            f"the plan's stages wait for each other for ever: in_flight {depths} cannot feed '{plan.config}'",
            hint="make the plan again with: plan solve",
        )
    rows = Events.of(events)
    memory = memory_curves(plan, rows.rows())
    return Timeline.of_plan(plan, "simulated", count, rows, memory=memory, links=tuple(links.uses()))


def default_minibatches(plan: Plan) -> int:
    """Four times what is in flight, so that a good part of the run is neither start-up nor drain."""
    if plan.schedule not in ASYNCHRONOUS:
        return FEWEST
    first = plan.stages[0]
    return min(
        max(4 * first.in_flight * first.replicas // plan.microbatches, FEWEST_ASYNCHRONOUS), MOST // plan.workers + 1
    )


def stage_times(plan: Plan) -> list[StageTimes]:
    """Seconds of each stage's computations."""
    topology = Topology(plan.cluster)
    slowest = topology.link(len(topology) - 1)
    plain = [
        StageTimes(s.forward_s, s.backward_s, s.update_s, recompute_s=s.forward_s if s.recompute else 0.0)
        for s in plan.stages
    ]
    return [with_handling(times, number, plan.transfers, slowest) for number, times in enumerate(plain)]


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
