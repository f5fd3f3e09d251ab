"""The simulation of the part of a run that was measured."""

from __future__ import annotations

import math
from bisect import bisect_right

from planner.errors import InputError
from planner.formats.plan import Plan
from planner.formats.timeline import LANES, Event, Events, LinkUse, MemoryCurve, Timeline
from planner.simulator.plan import default_minibatches, simulate

ROUNDS = ("update", "all_reduce")  # events of rounds, not of minibatches


def simulate_beside(plan: Plan, measured: Timeline) -> Timeline:
    """The minibatches that `measured` has events of, simulated: their numbers are the run's, 0 is their first start.

    Of a long run only as much is simulated before and after them as it takes for the pipeline to be as full as there.

    Raises:
        InputError: for a run without computations.
        PlanError: as `simulate`.
    """
    noted = {event.minibatch for event in measured.events.rows() if event.kind == "forward"}
    if not noted:
        raise InputError("the run has no computations to lay over the simulation", hint="record one with `trace`")
    first, end = min(noted), max(noted) + 1
    enough = default_minibatches(plan, measured.accumulate)
    period = math.lcm(*plan.replicas) * measured.accumulate
    skipped = max(0, first - enough) // period * period  # whole rounds of the round-robin
    after = min(max(measured.minibatches - end, 0), enough)
    simulated = simulate(plan, end - skipped + after, measured.accumulate)
    return _renumbered(cut(simulated, range(first - skipped, end - skipped)), skipped)


def cut(timeline: Timeline, minibatches: range) -> Timeline:
    """These minibatches of a run, in time from the start of their first computation."""
    rows = list(timeline.events.rows())
    computed = [e for e in rows if LANES[e.kind] == "compute" and e.kind not in ROUNDS and e.minibatch in minibatches]
    start, end = min(e.start_s for e in computed), max(e.end_s for e in computed)
    kept = [e for e in rows if (start <= e.start_s < end if e.kind in ROUNDS else e.minibatch in minibatches)]
    moved = [e._replace(start_s=max(0.0, e.start_s - start), end_s=e.end_s - start) for e in kept if e.end_s >= start]
    return timeline.model_copy(
        update={
            "minibatches": len(minibatches),
            "events": Events.of(moved),
            "memory": tuple(_curve(curve, start, end) for curve in timeline.memory),
            "links": tuple(_link(link, start, end) for link in timeline.links),
        }
    )


def _curve(curve: MemoryCurve, start: float, end: float) -> MemoryCurve:
    now = max(bisect_right(curve.time_s, start) - 1, 0)
    last = bisect_right(curve.time_s, end)
    times = [max(0.0, time_s - start) for time_s in curve.time_s[now:last]]
    return curve.model_copy(update={"time_s": tuple(times), "held_bytes": curve.held_bytes[now:last]})


def _link(link: LinkUse, start: float, end: float) -> LinkUse:
    busy = [
        (max(s, start) - start, min(e, end) - start, share)
        for s, e, share in zip(link.start_s, link.end_s, link.share or [1.0] * len(link.start_s), strict=True)
        if s < end and e > start
    ]
    starts, ends, shares = zip(*busy, strict=True) if busy else ((), (), ())
    return link.model_copy(update={"start_s": starts, "end_s": ends, "share": shares})


def _renumbered(timeline: Timeline, skipped: int) -> Timeline:
    if not skipped:
        return timeline

    def number(event: Event) -> int:
        rounds = event.kind in ROUNDS and timeline.microbatches == 1
        return event.minibatch + (
            skipped // (len(timeline.ranks[event.stage]) * timeline.accumulate) if rounds else skipped
        )

    rows = (event._replace(minibatch=number(event)) for event in timeline.events.rows())
    return timeline.model_copy(update={"events": Events.of(rows)})
