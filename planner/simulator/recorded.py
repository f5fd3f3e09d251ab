"""Simulate the part of a run that was recorded."""

from __future__ import annotations

import math
from bisect import bisect_right

from planner.errors import InputError
from planner.formats.plan import Plan
from planner.formats.timeline import LANES, Event, Events, LinkUse, MemoryCurve, Timeline
from planner.simulator.simulate_plan import default_minibatches, simulate

ROUNDS = ("update", "all_reduce", "all_gather")  # events that happen once per round, not per minibatch


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
