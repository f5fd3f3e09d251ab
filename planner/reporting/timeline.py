"""What the page and the trace show of a timeline: which workers, in which rows, in which colours
and words.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from planner.formats.timeline import LANES, Event, EventKind, Lane, Timeline
from planner.simulator.summary import Summary

MOST_WORKERS = 64  # on a page
OPENING = 6  # minibatches on show at first
_UNITS = 48  # microbatches on show at first, at most: more than these are too narrow to read
LANE_ORDER: tuple[Lane, ...] = ("compute", "send", "receive", "all-reduce")

# Colours of a lane differ for colour-blind readers, too. All have a contrast of 3 on white and on
# near-black (WCAG 2).
_LOOKS: dict[EventKind, tuple[str, str]] = {
    "forward": ("#0072b2", "forward"),
    "recompute": ("#1f95ef", "recomputation"),
    "backward": ("#b84f00", "backward"),
    "backward_input": ("#b84f00", "backward for the inputs"),
    "backward_weight": ("#cc8400", "backward for the weights"),
    "update": ("#7d6b60", "update"),
    "send_activation": ("#3b8fc4", "activations sent"),
    "send_gradient": ("#c87420", "gradients sent"),
    "receive_activation": ("#3b8fc4", "activations received"),
    "receive_gradient": ("#c87420", "gradients received"),
    "all_reduce": ("#b0447d", "all-reduce"),
    "all_gather": ("#c080b0", "all-gather"),
}
# colours that black is easier to read on
_LIGHT = ("#1f95ef", "#cc8400", "#3b8fc4", "#c87420", "#c080b0")
COLOURS = {kind: colour for kind, (colour, _) in _LOOKS.items()}
TEXTS = {kind: text for kind, (_, text) in _LOOKS.items()}


def shown_workers(timeline: Timeline) -> tuple[int, ...]:
    """Choose the workers to draw: all, or if they are too many, one of every stage or of evenly
    spaced stages.
    """
    if len(timeline.workers) <= MOST_WORKERS:
        return timeline.workers
    first = sorted({ranks[0] for ranks in timeline.ranks})
    step = -(-len(first) // MOST_WORKERS)
    return tuple(first[::step])


def opening(summary: Summary, timeline: Timeline, span: float) -> tuple[float, float]:
    """Return the stretch of time on show at first: about six steady minibatches, fewer of many
    microbatches each.
    """
    length = summary.seconds_per_minibatch * max(2, min(OPENING, _UNITS // timeline.microbatches))
    if not 0 < length < 0.75 * span:
        return 0.0, span
    if summary.steady:
        start = summary.steady_from_s
    else:
        start = (span - length) / 2
    return start, min(start + length, span)


def colour_legend(kinds: Iterable[EventKind]) -> list[tuple[str, str]]:
    """List the colours of these kinds of events, each with what it stands for."""
    found: dict[str, dict[str, None]] = {}
    present = set(kinds)
    for kind in LANES:
        if kind in present:
            # Both ends of a message have one colour: "activations sent" and "activations received"
            # are "activations".
            if LANES[kind] in ("send", "receive"):
                text = TEXTS[kind].split()[0]
            else:
                text = TEXTS[kind]
            found.setdefault(COLOURS[kind], {})[text] = None

    return [(colour, ", ".join(texts)) for colour, texts in found.items()]


class Row(NamedTuple):
    """A row of a picture: one lane of one worker, in a real run several with what overlaps
    in it.
    """

    run: int  # its place among the runs of the picture
    lane: Lane
    events: list[Event]


def rows_of(runs: Sequence[Timeline], workers: Sequence[int]) -> dict[int, list[Row]]:
    """Arrange the events of each of these workers in rows from top to bottom, those of the first
    run above.
    """
    shown: dict[int, list[Row]] = {rank: [] for rank in workers}
    for number, run in enumerate(runs):
        events = [event for event in run.events.rows() if event.rank in shown]
        rows = _by_place(events)
        for rank, lane, row in sorted(rows):
            shown[rank].append(Row(number, LANE_ORDER[lane], rows[rank, lane, row]))
    return shown


def _by_place(events: Iterable[Event]) -> dict[tuple[int, int, int], list[Event]]:
    """Return the events of each row of a lane of a worker."""
    rows: dict[tuple[int, int, int], list[Event]] = {}
    for event, row in side_by_side(events):
        place = (event.rank, LANE_ORDER.index(event.lane), row)
        rows.setdefault(place, []).append(event)
    return rows


def side_by_side(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """Yield each event and its row: the first of its worker's lane that is free by then. `events`
    by their start.

    A lane needs one row, except in real runs, which have several messages in progress at once.
    """
    free: dict[tuple[int, Lane], list[float]] = {}
    for event in events:
        ends = free.setdefault((event.rank, event.lane), [])
        row = next((number for number, end in enumerate(ends) if end <= event.start_s), len(ends))
        ends[row:] = [event.end_s, *ends[row + 1 :]]
        yield event, row


def ink_on(ground: str) -> str:
    """Return white or black, whichever is easier to read on one of the colours."""
    if ground in _LIGHT:
        return "#000000"
    return "#ffffff"
