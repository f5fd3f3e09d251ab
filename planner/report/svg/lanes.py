"""Arrange a timeline's events in rows in which none overlap, and name their colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.formats.timeline import Event, Kind, Lane, Timeline

LANE_ORDER: tuple[Lane, ...] = ("compute", "send", "receive", "all-reduce")
MOST_WORKERS = 64  # drawn in one picture

# White text on them has a contrast of 4.5 or more, they themselves have 3 or more on white and on near-black (WCAG 2).
COLOURS: dict[Kind, str] = {
    "forward": "#0072b2",
    "recompute": "#6a60c4",
    "backward": "#b84f00",
    "backward_input": "#b84f00",
    "backward_weight": "#8a6100",
    "update": "#007a5a",
    "send_activation": "#3b8fc4",
    "send_gradient": "#c87420",
    "receive_activation": "#3b8fc4",
    "receive_gradient": "#c87420",
    "all_reduce": "#b0447d",
}
TEXTS: dict[Kind, str] = {
    "forward": "forward",
    "recompute": "forward once more",
    "backward": "backward",
    "backward_input": "backward, for the inputs",
    "backward_weight": "backward, for the weights",
    "update": "update",
    "send_activation": "activations sent",
    "send_gradient": "gradients sent",
    "receive_activation": "activations received",
    "receive_gradient": "gradients received",
    "all_reduce": "all-reduce",
}


def shown_workers(timeline: Timeline) -> tuple[int, ...]:
    """All workers; where they are too many for a page, one of every stage, or of evenly spaced stages."""
    if len(timeline.workers) <= MOST_WORKERS:
        return timeline.workers
    first = sorted({ranks[0] for ranks in timeline.ranks})
    step = -(-len(first) // MOST_WORKERS)
    return tuple(first[::step])


def side_by_side(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """Each event and its row: the first of its worker's lane that is free by then. `events` by their start.

    One row per lane does, but where a real run has several messages under way at once.
    """
    free: dict[tuple[int, Lane], list[float]] = {}
    for event in events:
        ends = free.setdefault((event.rank, event.lane), [])
        row = next((number for number, end in enumerate(ends) if end <= event.start_s), len(ends))
        ends[row:] = [event.end_s, *ends[row + 1 :]]
        yield event, row
