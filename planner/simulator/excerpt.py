"""A part of a run: some of its minibatches, with time from the start of their first computation."""

from bisect import bisect_right

from planner.formats.files import replace
from planner.formats.timeline import LANES, Event, Events, LinkUse, MemoryCurve, Timeline

# Events that happen once per round, not per minibatch.
ROUNDS = ("update", "all_reduce", "all_gather")


def only_minibatches(timeline: Timeline, minibatches: range) -> Timeline:
    """Keep these minibatches of a run, with time from the start of their first computation."""
    rows = list(timeline.events.rows())
    computed = [event for event in rows if _computes(event) and event.minibatch in minibatches]
    start_s = min(event.start_s for event in computed)
    end_s = max(event.end_s for event in computed)

    def is_kept(event: Event) -> bool:
        # Rounds have numbers of their own, so they are chosen by their time.
        if event.kind in ROUNDS:
            return start_s <= event.start_s < end_s
        return event.minibatch in minibatches and event.end_s >= start_s

    return replace(
        timeline,
        minibatches=len(minibatches),
        events=Events.of([_moved(event, start_s) for event in rows if is_kept(event)]),
        memory=tuple(_memory_within(curve, start_s, end_s) for curve in timeline.memory),
        links=tuple(_use_within(link, start_s, end_s) for link in timeline.links),
    )


def _computes(event: Event) -> bool:
    return LANES[event.kind] == "compute" and event.kind not in ROUNDS


def _moved(event: Event, start_s: float) -> Event:
    """Return the event with time from `start_s`, at which it may have begun already."""
    return event._replace(
        start_s=max(0.0, event.start_s - start_s),
        end_s=event.end_s - start_s,
    )


def _memory_within(curve: MemoryCurve, start_s: float, end_s: float) -> MemoryCurve:
    """Return the part of a curve between two times, from the step before the first."""
    first = max(bisect_right(curve.time_s, start_s) - 1, 0)
    part = slice(first, bisect_right(curve.time_s, end_s))
    times = tuple(max(0.0, time_s - start_s) for time_s in curve.time_s[part])
    return replace(curve, time_s=times, held_bytes=curve.held_bytes[part])


def _use_within(link: LinkUse, start_s: float, end_s: float) -> LinkUse:
    """Return the part of a link's use between two times."""
    starts_s = []
    ends_s = []
    kept_shares = []
    shares = link.share or [1.0] * len(link.start_s)
    for from_s, to_s, share in zip(link.start_s, link.end_s, shares, strict=True):
        if from_s >= end_s or to_s <= start_s:
            continue
        starts_s.append(max(from_s, start_s) - start_s)
        ends_s.append(min(to_s, end_s) - start_s)
        kept_shares.append(share)

    return replace(
        link,
        start_s=tuple(starts_s),
        end_s=tuple(ends_s),
        share=tuple(kept_shares),
    )
