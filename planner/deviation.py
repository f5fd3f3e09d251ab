"""How far a run was from another one of the same plan, event by event."""

from __future__ import annotations

from statistics import median

from planner.errors import InputError
from planner.files import Record
from planner.timeline import Event, Timeline

COMPARED = ("forward", "backward", "backward_input", "backward_weight")


class Deviation(Record):
    """Starts and ends of the forwards and backwards that both runs have, as shares of the longer run's length."""

    events: int
    median_share: float
    worst_share: float


def deviation(predicted: Timeline, measured: Timeline) -> Deviation:
    """Compare starts and ends of every forward and backward.

    Raises:
        InputError: when the two are not runs of the same plan.
    """
    for what in ("config", "schedule", "ranks", "microbatches"):
        expected, found = getattr(predicted, what), getattr(measured, what)
        if expected != found:
            raise InputError(
                f"the run is of another plan: its {what} {_shown(found)} is not the plan's {_shown(expected)}",
                hint="name the plan that was run with --plan",
            )
    ours, theirs = _computed(predicted), _computed(measured)
    length = max(predicted.span_s, measured.span_s)
    apart = [
        distance / length
        for key in ours.keys() & theirs.keys()
        for distance in (
            abs(ours[key].start_s - theirs[key].start_s),
            abs(ours[key].end_s - theirs[key].end_s),
        )
        if length > 0
    ]
    return Deviation(
        events=len(apart) // 2,
        median_share=median(apart) if apart else 0.0,
        worst_share=max(apart, default=0.0),
    )


def _computed(timeline: Timeline) -> dict[tuple[object, ...], Event]:
    return {
        (event.rank, event.kind, event.stage, event.minibatch, event.microbatch): event
        for event in timeline.events.rows()
        if event.kind in COMPARED
    }


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
