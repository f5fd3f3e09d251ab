"""Simulate a plan: every event of a run, worker by worker and link by link, and the memory of each worker over time.

Memory follows from the plan's peaks. An equal part of the activations is held for each unit from the start of its
forward to the end of its backward, and under weight stashing a version of the weights while it is the newest or a unit
in flight uses it; the rest all the time.
"""

import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

from planner.arguments import checked
from planner.errors import InputError
from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.formats.timeline import LANES, Event, Events, MemoryCurve, Timeline
from planner.plan.lengths import planned_terms
from planner.plan.rank_groups import of_groups
from planner.plan.shape import deadlock, shape_of
from planner.simulator.fair_network import BusyPeriod
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.simulator.simulation import Simulation
from planner.simulator.steady_time import steady_minibatches, steady_s

_DEEPEST = 2**12  # units in flight: a stage that may have more waits for none of them
ROUNDS = ("update", "all_reduce", "all_gather")  # events that happen once per round, not per minibatch
TimedBytes = tuple[float, int]


def memory_curves(plan: Plan, events: Iterable[Event]) -> tuple[MemoryCurve, ...]:
    computed: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in ("forward", "backward", "backward_weight", "update"):
            computed[event.rank, event.stage].append(event)
    held, changes = Counter[int](), defaultdict[int, list[TimedBytes]](list)
    stashing = plan.schedule.stashes
    for number, stage in enumerate(plan.stages):
        memory, versions = stage.memory, plan.schedule.versions(stage.in_flight) if stashing else 1
        version_bytes = memory.weights_bytes // versions
        older_bytes = memory.weights_bytes - version_bytes if stashing else 0
        for rank in stage.ranks:
            held[rank] += memory.total_bytes - memory.activations_bytes - older_bytes
            changes[rank] += _changes(stage, version_bytes if stashing else 0, computed[rank, number])
    return tuple(_curve(plan, rank, held[rank], changes[rank]) for rank in sorted(held))


def _changes(stage: Stage, version_bytes: int, events: Iterable[Event]) -> Iterable[TimedBytes]:
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
            case _:
                if used[newest]:  # units in flight keep the old version beside the new one
                    yield event.end_s, version_bytes
                newest += 1


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
MOST_UNITS = 2**20  # of work that are simulated: a minute or so, and a gigabyte of events


@checked
def simulate(plan: Plan, minibatches: int | None = None, *, time_limit_s: float | None = None) -> Timeline:
    """Simulate the instruction streams of training with `plan`, at the plan's times. A group of ranks is one worker.

    Args:
        plan: from `solve` or `load_plan`.
        minibatches: to simulate; None for enough to reach a steady state.
        time_limit_s: seconds that it may take; None for as long as it takes.

    Raises:
        InputError: for a number of minibatches below 1, for more work than is simulated, or past the time limit.
        PlanError: for a plan whose depths let its workers wait for each other for ever.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> plan = planner.solve(profile, planner.flat_cluster(gpus=4, bandwidth_bytes_per_s=125e6))
        >>> timeline = planner.simulate(plan, minibatches=8)
        >>> timeline.name_of(next(timeline.events.rows()))
        'F0'
    """
    costs, plan = costs_of(plan), of_groups(plan)
    count = default_minibatches(plan) if minibatches is None else minibatches
    if count < 1:
        raise InputError(f"`minibatches={count}` is no run", hint="give `minibatches` 1 or more")
    _check_amount(plan, count)
    events: list[Event] = []
    late = None
    if time_limit_s is not None:
        ends_at_s = time.monotonic() + time_limit_s
        late = partial(_is_past, ends_at_s)
    simulation = Simulation(costs, count, events, late)
    match simulation.run():
        case "deadlock":
            raise deadlock(plan)
        case "late":
            raise InputError(
                f"the simulation of {_amount(plan, count)} took longer than `time_limit_s={time_limit_s:.3g}`",
                hint="give a longer `time_limit_s`, or simulate fewer minibatches",
            )
    rows = Events.of(events)
    memory = memory_curves(plan, rows.rows())
    links = simulation.communication.links.uses([rank for stage in plan.stages for rank in stage.ranks])
    others: dict[str, Any] = {"memory": memory, "links": tuple(links)}
    if plan.lengths is not None:
        drawn = enumerate(islice(cycle(plan.lengths.microbatches), count * plan.microbatches))
        others["lengths"] = tuple((*divmod(number, plan.microbatches), *each) for number, each in drawn)
        others["length_names"] = plan.lengths.names
    return Timeline.of_plan(plan, "simulated", count, rows, **others)


def _is_past(ends_at_s: float) -> bool:
    return time.monotonic() > ends_at_s


def _amount(plan: Plan, minibatches: int) -> str:
    each = f"of {plan.microbatches:,} microbatches at {len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    return f"{minibatches:,} minibatch{'es' * (minibatches > 1)} {each}"


def _check_amount(plan: Plan, minibatches: int) -> None:
    """Raise InputError for more work than can be simulated, and looked at."""
    each = plan.microbatches * len(plan.stages)
    if minibatches * each <= MOST_UNITS:
        return
    problem = (
        f"{_amount(plan, minibatches)}: {minibatches * each:,} units of work, and at most {MOST_UNITS:,} are simulated"
    )
    hint = f"give `minibatches={MOST_UNITS // each}` or fewer"
    if each > MOST_UNITS:  # a single minibatch is too much
        hint = f"solve with at most `microbatches={MOST_UNITS // len(plan.stages)}`, and simulate that plan"
    raise InputError(problem, hint=hint)


def check_runs_to_end(plan: Plan) -> None:
    """Raise PlanError when the plan's streams do not run to their end: those of a plan edited by hand may not.

    A run that is longer than is simulated is checked by a shorter one, which fills the pipeline and drains it likewise.
    """
    costs = costs_of(plan)
    shape = costs.shape
    depth = max(min(stage.in_flight, _DEEPEST) for stage in plan.stages)
    most_replicas = max(shape.replicas)
    period = math.lcm(*shape.replicas, len(shape.first_stages))
    few = shape.shortened(3 * depth * most_replicas + 2 * period)
    costs = replace(costs, shape=few)
    minibatches = max(2, 4 * most_replicas * depth // few.microbatches)
    if Simulation(costs, minibatches).run() == "deadlock":
        raise deadlock(plan)


def simulated_s(plan: Plan) -> float:
    """Compute the seconds per minibatch in the steady state of `plan`, as `simulate` does, without recording events."""
    seconds = steady_s(costs_of(plan))
    assert seconds is not None
    if math.isinf(seconds):
        raise deadlock(plan)
    return seconds


def default_minibatches(plan: Plan) -> int:
    """Return enough minibatches for a steady state, and to see how the run starts and ends."""
    count = steady_minibatches(shape_of(plan))
    if plan.lengths is not None:  # each of its microbatches once, while the pipeline is full: see `summarize`
        first, whole = plan.stages[0], plan.microbatches
        filling = 2 * first.in_flight * first.replicas if plan.schedule.asynchronous else whole
        count = max(count, math.ceil((len(plan.lengths.microbatches) + filling) / whole))
    each = plan.microbatches * len(plan.stages)
    if not plan.schedule.asynchronous:
        count = max(count, min(FEWEST, _ENOUGH_UNITS // each))
    return min(count, max(1, MOST_UNITS // each))


def costs_of(plan: Plan) -> PipelineCosts:
    """Return the plan's pipeline and its costs, as a simulation takes them."""
    degrees, plan = plan.degrees, of_groups(plan)
    shape = shape_of(plan)
    # Gradients of weights shared with earlier stages are in the stage's memory, but not in its all-reduce.
    received_bytes, seen = Counter[int](), set[tuple[int, str]]()
    for shared in plan.shared:
        weights = {(shared.stages[1], name) for name in shared.weights}
        received_bytes[shared.stages[1]] += 0 if weights <= seen else shared.gradient_bytes
        seen |= weights
    same = {"forward_s", "backward_s", "update_s", "accumulate_s", "ready_s", "ready_shares", "late_s"}
    same |= {"forward_shares", "backward_shares", "exchanged"}
    stages = [
        StageCosts(
            **{name: getattr(stage, name) for name in same},
            recompute_s=stage.again_s,
            # At the higher levels all exchanges are in the seconds.
            gradient_bytes=0 if stage.level > 1 else stage.memory.gradients_bytes - received_bytes[number],
            sharded=stage.level == 1,
        )
        for number, stage in enumerate(plan.stages)
    ]
    varied = planned_terms(plan.lengths)
    return PipelineCosts.of(shape, plan.cluster, stages, plan.transfers, plan.shared, degrees, varied)


def simulate_recorded(plan: Plan, measured: Timeline, *, time_limit_s: float | None = None) -> Timeline:
    """Simulate the minibatches of which `measured` has events, and as many before and after as fill the pipeline.

    Minibatches keep their numbers in the run, and time counts from the start of the first of them. Raise InputError for
    a run without computations.
    """
    recorded = {event.minibatch for event in measured.events.rows() if event.kind == "forward"}
    if not recorded:
        raise InputError("the run has no computations to compare with the simulation", hint="record one with `trace`")
    first, end = min(recorded), max(recorded) + 1
    filling = default_minibatches(plan)
    # Whole rounds of the round-robin are skipped, so that each minibatch is on the replica that ran it.
    period = math.lcm(*plan.replicas)
    skipped = max(0, first - filling) // period * period
    after = min(max(measured.minibatches - end, 0), filling)
    plan = _with_lengths_of(plan, measured, skipped)
    simulated = simulate(plan, end - skipped + after, time_limit_s=time_limit_s)
    found = only_minibatches(simulated, range(first - skipped, end - skipped))

    def skips(event: Event) -> int:
        if event.kind in ROUNDS and plan.microbatches == 1:  # a round under 1f1b has several minibatches
            return skipped // len(found.ranks[event.stage])
        return skipped

    rows = (event._replace(minibatch=event.minibatch + skips(event)) for event in found.events.rows())
    return found.model_copy(update={"events": Events.of(rows), "lengths": measured.lengths})


def _with_lengths_of(plan: Plan, run: Timeline, skipped: int) -> Plan:
    """Return the plan for the lengths that microbatches had in a run, from the minibatch `skipped` of it on."""
    if plan.lengths is None or not run.lengths:
        return plan
    columns, drawn = [2 + run.length_names.index(name) for name in plan.lengths.names], plan.lengths.microbatches
    found = {(row[0] - skipped) * plan.microbatches + row[1]: tuple(row[at] for at in columns) for row in run.lengths}
    rows = tuple(found.get(number, drawn[number % len(drawn)]) for number in range(max(found) + 1))
    return plan.model_copy(update={"lengths": plan.lengths.model_copy(update={"microbatches": rows})})


def only_minibatches(timeline: Timeline, minibatches: range) -> Timeline:
    """Keep these minibatches of a run, with time from the start of their first computation."""
    rows = list(timeline.events.rows())
    computed = [e for e in rows if LANES[e.kind] == "compute" and e.kind not in ROUNDS and e.minibatch in minibatches]
    start, end = min(e.start_s for e in computed), max(e.end_s for e in computed)
    # Rounds have numbers of their own, so they are chosen by their time.
    kept = [e for e in rows if (start <= e.start_s < end if e.kind in ROUNDS else e.minibatch in minibatches)]
    moved = [e._replace(start_s=max(0.0, e.start_s - start), end_s=e.end_s - start) for e in kept if e.end_s >= start]
    curves = []
    for curve in timeline.memory:
        part = slice(max(bisect_right(curve.time_s, start) - 1, 0), bisect_right(curve.time_s, end))
        times = tuple(max(0.0, time_s - start) for time_s in curve.time_s[part])
        curves.append(curve.model_copy(update={"time_s": times, "held_bytes": curve.held_bytes[part]}))
    links = []
    for link in timeline.links:
        busy = [
            (max(s, start) - start, min(e, end) - start, share)
            for s, e, share in zip(link.start_s, link.end_s, link.share or [1.0] * len(link.start_s), strict=True)
            if s < end and e > start
        ]
        columns = zip(*busy, strict=True) if busy else ((), (), ())
        links.append(link.model_copy(update=dict(zip(BusyPeriod._fields, columns, strict=True))))
    changed = {"minibatches": len(minibatches), "events": Events.of(moved)}
    return timeline.model_copy(update={**changed, "memory": tuple(curves), "links": tuple(links)})
