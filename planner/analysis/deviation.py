"""How far a run was from another one of the same plan, event by event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Literal

from planner.errors import InputError
from planner.formats.files import Record
from planner.formats.timeline import Event, Timeline

COMPARED = ("forward", "backward", "backward_input", "backward_weight")
_MOST_OF_THEM = 0.95


class Moment(Record):
    """The start or the end of a computation, in both runs."""

    name: str  # as timelines are drawn: "B3.1"
    at: Literal["start", "end"]
    rank: int
    stage: int
    predicted_s: float
    measured_s: float


class Deviation(Record):
    """Starts and ends of the forwards and backwards that both runs have: their distances as shares of the length of the
    measured run."""

    events: int
    median_share: float
    p95_share: float  # 95% of them are not further apart
    worst_share: float
    worst: Moment | None  # None where the runs have no event in common


class StageSeconds(Record):
    """Mean seconds of one stage's computations; 0 for what a run has none of.

    What runs the forward once more counts with the backward, as workers note it.
    """

    forward_s: float
    backward_s: float
    update_s: float


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
                hint="give the `plan` that was run",
            )
    ours, theirs = _computed(predicted), _computed(measured)
    length = measured.span_s
    moments = [
        Moment(
            name=measured.name_of(found),
            at=at,
            rank=found.rank,
            stage=found.stage,
            predicted_s=getattr(ours[key], f"{at}_s"),
            measured_s=getattr(found, f"{at}_s"),
        )
        for key, found in theirs.items()
        if key in ours and length > 0
        for at in ("start", "end")
    ]
    apart = sorted(abs(moment.predicted_s - moment.measured_s) / length for moment in moments)
    worst = max(moments, key=lambda moment: abs(moment.predicted_s - moment.measured_s), default=None)
    return Deviation(
        events=len(apart) // 2,
        median_share=median(apart) if apart else 0.0,
        p95_share=apart[int(_MOST_OF_THEM * (len(apart) - 1))] if apart else 0.0,
        worst_share=apart[-1] if apart else 0.0,
        worst=worst,
    )


def mean_seconds(timeline: Timeline) -> list[StageSeconds]:
    """By stage, the means over all that a run has of its computations."""
    seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
    counts: defaultdict[tuple[int, str], int] = defaultdict(int)
    for event in _joined(timeline.events.rows()):
        # Both parts of a backward in two are one backward.
        what = event.kind.partition("_")[0]
        seconds[event.stage, what] += event.end_s - event.start_s
        counts[event.stage, what] += event.kind != "backward_weight"
    return [
        StageSeconds(
            **{f"{what}_s": seconds[s, what] / max(1, counts[s, what]) for what in ("forward", "backward", "update")}
        )
        for s in range(len(timeline.ranks))
    ]


def _computed(timeline: Timeline) -> dict[tuple[object, ...], Event]:
    return {
        (event.rank, event.kind, event.stage, event.minibatch, event.microbatch): event
        for event in _joined(timeline.events.rows())
        if event.kind in COMPARED
    }


def _joined(events: Iterable[Event]) -> Iterable[Event]:
    """What is computed; a backward begins with the forward that is run once more for it."""
    again: dict[tuple[int, ...], float] = {}
    for event in events:
        unit = event.rank, event.stage, event.minibatch, event.microbatch
        if event.kind == "recompute":
            again[unit] = event.start_s
        elif event.kind in ("backward", "backward_input") and unit in again:
            yield event._replace(start_s=again.pop(unit))
        elif event.lane == "compute":
            yield event


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
