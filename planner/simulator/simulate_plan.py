"""Simulate a plan: every event of a run, worker by worker and link by link, and the memory of each worker over time.

Memory follows from the plan's peaks. Weights, gradients, optimizer state, buffers and message buffers are held all the
time. A unit's activations are held from the start of its forward to the end of its backward. Under weight stashing, a
version of the weights is held while it is the newest or a unit in flight uses it. The plan states the activations of
all units in flight together, so each unit counts for an equal part, which includes the working memory of the unit that
is computed. Of a run that was recorded in part, `simulate_recorded` simulates that part.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from planner.arguments import checked
from planner.errors import InputError
from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.formats.timeline import LANES, Event, Events, LinkUse, MemoryCurve, Timeline
from planner.plan.rank_groups import of_groups
from planner.plan.shape import check_accumulate, deadlock, shape_of
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady_time import steady_minibatches, steady_s

ROUNDS = ("update", "all_reduce", "all_gather")  # events that happen once per round, not per minibatch
TimedBytes = tuple[float, int]


def memory_curves(plan: Plan, events: Iterable[Event]) -> tuple[MemoryCurve, ...]:
    """Compute a curve for each worker; `events` by their start."""
    computed: dict[tuple[int, int], list[Event]] = {
        (rank, number): [] for number, stage in enumerate(plan.stages) for rank in stage.ranks
    }
    for event in events:
        if event.kind in ("forward", "backward", "backward_weight", "update"):
            computed[event.rank, event.stage].append(event)
    held: dict[int, int] = {}
    changes: dict[int, list[TimedBytes]] = {}
    # Vertical sync holds the same number of versions all the time.
    stashing = plan.schedule.stashes and not plan.vertical_sync
    for (rank, number), own in computed.items():
        stage, memory = plan.stages[number], plan.stages[number].memory
        version_bytes = memory.weights_bytes // plan.schedule.versions(stage.in_flight)
        stashed = memory.weights_bytes - version_bytes if stashing else 0
        held[rank] = held.get(rank, 0) + memory.total_bytes - memory.activations_bytes - stashed
        changes.setdefault(rank, []).extend(_changes(stage, version_bytes if stashing else 0, own))
    return tuple(_curve(plan, rank, held[rank], changes[rank]) for rank in sorted(held))


def _changes(stage: Stage, version_bytes: int, events: Iterable[Event]) -> Iterable[TimedBytes]:
    """Yield what one stage of a worker adds and frees, by its computations in order; versions of 0 bytes stay."""
    saved = stage.memory.activations_bytes // stage.in_flight
    newest, used = 0, Counter[int]()
    version_of: dict[tuple[int, int], int] = {}
    for event in events:
        unit = event.minibatch, event.microbatch
        match event.kind:
            case "forward":
                version_of[unit] = newest
                used[newest] += 1
                yield event.start_s, saved
            case "backward" | "backward_weight":
                version = version_of.pop(unit)
                used[version] -= 1
                yield event.end_s, -saved
                if version != newest and not used[version]:
                    yield event.end_s, -version_bytes
            case "update":
                if used[newest]:  # units in flight keep the old version beside the new one
                    yield event.end_s, version_bytes
                newest += 1
            case _:
                raise AssertionError(event.kind)


def _curve(plan: Plan, rank: int, held: int, changes: list[TimedBytes]) -> MemoryCurve:
    """Sum the changes; sorting puts what is freed at a moment before what is added, so they do not add up to a peak."""
    after = {0.0: held}
    for time_s, change in sorted(changes):
        held += change
        after[time_s] = held
    times = list(after)
    steps = {0.0: after[0.0]} | {now: after[now] for before, now in pairwise(times) if after[now] != after[before]}
    limit = plan.cluster.memory_on([rank])
    return MemoryCurve(rank=rank, time_s=tuple(steps), held_bytes=tuple(steps.values()), limit_bytes=limit)


FEWEST = 16  # minibatches of a synchronous schedule, by default
_ENOUGH_UNITS = 16_000  # of work, a microbatch at a stage each, that are enough to look at


@checked
def simulate(plan: Plan, minibatches: int | None = None, accumulate: int = 1) -> Timeline:
    """Simulate the instruction streams of training with `plan`, at the plan's times. A group of ranks is one worker.

    Args:
        plan: from `solve` or `load_plan`.
        minibatches: to simulate; None for enough to reach a steady state.
        accumulate: minibatches per replica between two updates, under 1f1b, as in `TrainingOptions`.

    Raises:
        InputError: for a number of minibatches below 1, and for a schedule that cannot accumulate over minibatches.
        PlanError: for a plan whose depths let its workers wait for each other for ever.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> timeline = planner.simulate(plan, minibatches=8)
        >>> timeline.name_of(next(timeline.events.rows()))
        'F0'
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
    """Compute the seconds per minibatch in the steady state of `plan`, as `simulate` does, without recording events."""
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


def simulate_recorded(plan: Plan, measured: Timeline) -> Timeline:
    """Simulate the minibatches of which `measured` has events.

    Minibatches keep their numbers in the run, and time counts from the start of the first of them. From a long run only
    so many minibatches before and after are simulated as the pipeline takes to fill. Raise InputError for a run without
    computations.
    """
    recorded = {event.minibatch for event in measured.events.rows() if event.kind == "forward"}
    if not recorded:
        raise InputError("the run has no computations to compare with the simulation", hint="record one with `trace`")
    first, end = min(recorded), max(recorded) + 1
    filling = default_minibatches(plan, measured.accumulate)
    # Whole rounds of the round-robin are skipped, so that each minibatch is on the replica that ran it.
    period = math.lcm(*plan.replicas) * measured.accumulate
    skipped = max(0, first - filling) // period * period
    after = min(max(measured.minibatches - end, 0), filling)
    simulated = simulate(plan, end - skipped + after, measured.accumulate)
    return _renumbered(only_minibatches(simulated, range(first - skipped, end - skipped)), skipped)


def only_minibatches(timeline: Timeline, minibatches: range) -> Timeline:
    """Keep these minibatches of a run, with time from the start of their first computation."""
    rows = list(timeline.events.rows())
    computed = [e for e in rows if LANES[e.kind] == "compute" and e.kind not in ROUNDS and e.minibatch in minibatches]
    start, end = min(e.start_s for e in computed), max(e.end_s for e in computed)
    # Rounds have numbers of their own, so they are chosen by their time.
    kept = [e for e in rows if (start <= e.start_s < end if e.kind in ROUNDS else e.minibatch in minibatches)]
    moved = [e._replace(start_s=max(0.0, e.start_s - start), end_s=e.end_s - start) for e in kept if e.end_s >= start]
    return timeline.model_copy(
        update={
            "minibatches": len(minibatches),
            "events": Events.of(moved),
            "memory": tuple(_part_of_curve(curve, start, end) for curve in timeline.memory),
            "links": tuple(_part_of_link(link, start, end) for link in timeline.links),
        }
    )


def _part_of_curve(curve: MemoryCurve, start: float, end: float) -> MemoryCurve:
    kept = slice(max(bisect_right(curve.time_s, start) - 1, 0), bisect_right(curve.time_s, end))
    times = tuple(max(0.0, time_s - start) for time_s in curve.time_s[kept])
    return curve.model_copy(update={"time_s": times, "held_bytes": curve.held_bytes[kept]})


def _part_of_link(link: LinkUse, start: float, end: float) -> LinkUse:
    busy = [
        (max(s, start) - start, min(e, end) - start, share)
        for s, e, share in zip(link.start_s, link.end_s, link.share or [1.0] * len(link.start_s), strict=True)
        if s < end and e > start
    ]
    starts, ends, shares = zip(*busy, strict=True) if busy else ((), (), ())
    return link.model_copy(update={"start_s": starts, "end_s": ends, "share": shares})


def _renumbered(timeline: Timeline, skipped: int) -> Timeline:
    """Add the minibatches that were not simulated to all numbers; a round under 1f1b has several minibatches."""
    if not skipped:
        return timeline

    def number(event: Event) -> int:
        if event.kind in ROUNDS and timeline.microbatches == 1:
            return event.minibatch + skipped // (len(timeline.ranks[event.stage]) * timeline.accumulate)
        return event.minibatch + skipped

    rows = (event._replace(minibatch=number(event)) for event in timeline.events.rows())
    return timeline.model_copy(update={"events": Events.of(rows)})
