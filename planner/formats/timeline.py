"""The Timeline: what every worker of a pipeline did and when, simulated or measured.

The simulator and training runs make the same record, so that the two can be compared event by event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from planner.errors import InputError
from planner.formats.files import Record, load_record, write_text
from planner.formats.plan import Plan
from planner.formats.plan_parts import ScheduleField
from planner.formats.shown import Shown

REMEDY = "see timeline.json in the file formats"

EventKind = Literal[
    "forward",
    "recompute",
    "backward",
    "backward_input",  # where the schedule splits the backward: gradients of inputs, which earlier stages wait for
    "backward_weight",  # the other part: gradients of weights
    "update",
    "send_activation",
    "send_gradient",
    "receive_activation",
    "receive_gradient",
    "all_reduce",  # or the reduce-scatter of a stage whose optimizer is sharded
    "all_gather",  # of its weights, after the update
]
Lane = Literal["compute", "send", "receive", "all-reduce"]

_DRAWN: dict[EventKind, tuple[Lane, str]] = {
    "forward": ("compute", "F"),
    "recompute": ("compute", "R"),
    "backward": ("compute", "B"),
    "backward_input": ("compute", "B"),
    "backward_weight": ("compute", "W"),
    "update": ("compute", "U"),
    "send_activation": ("send", "A"),
    "send_gradient": ("send", "G"),
    "receive_activation": ("receive", "A"),
    "receive_gradient": ("receive", "G"),
    "all_reduce": ("all-reduce", "S"),
    "all_gather": ("all-reduce", "S"),
}
LANES: dict[EventKind, Lane] = {kind: lane for kind, (lane, _) in _DRAWN.items()}
LETTERS: dict[EventKind, str] = {kind: letter for kind, (_, letter) in _DRAWN.items()}


class Event(NamedTuple):
    """Something that a worker, or one of its links, did from `start_s` to `end_s`.

    A message lasts as long as its bytes are on the link; `peer_rank` and `peer_stage` are its other end. Updates and
    all-reduces happen once per round: their `minibatch` is the number of the round, their `microbatch` is 0.
    """

    rank: int
    kind: EventKind
    stage: int
    minibatch: int
    microbatch: int
    start_s: float
    end_s: float
    peer_rank: int | None = None
    peer_stage: int | None = None

    @property
    def lane(self) -> Lane:
        """The part of the worker that was busy."""
        return LANES[self.kind]


def _check_lengths(record: Record, *names: str) -> None:
    lengths = {name: len(getattr(record, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the lists differ in length: {lengths}")


class Events(Record):
    """Events, as one list per field because there may be hundreds of thousands. The first computation is at time 0."""

    rank: tuple[int, ...]
    kind: tuple[EventKind, ...]
    stage: tuple[int, ...]
    minibatch: tuple[int, ...]  # for updates and all-reduces, the round
    microbatch: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    peer_rank: tuple[int | None, ...]  # the other end of a message
    peer_stage: tuple[int | None, ...]

    @classmethod
    def of(cls, rows: Iterable[Event]) -> Events:
        """Return the record of `rows`, which may be in any order, sorted by start."""
        ordered = sorted(rows, key=lambda event: (event.start_s, event.rank, event.end_s))
        columns = zip(*ordered, strict=True) if ordered else ((),) * len(Event._fields)
        fields: dict[str, Any] = dict(zip(Event._fields, columns, strict=True))
        # Rows are typed already, and validating hundreds of thousands of them would take a second.
        return cls.model_construct(**fields)

    def __len__(self) -> int:
        return len(self.rank)

    def rows(self) -> Iterator[Event]:
        """Yield the events one by one, sorted by start."""
        return map(Event._make, zip(*(getattr(self, name) for name in Event._fields), strict=True))

    @model_validator(mode="after")
    def _check(self) -> Events:
        _check_lengths(self, *Event._fields)
        for number, (start, end) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            if end < start:
                raise ValueError(f"event {number} ends at {end} s, before it starts at {start} s")
        return self


class MemoryCurve(Record):
    """Memory of a worker over time: it holds `held_bytes[i]` from `time_s[i]` on."""

    rank: int
    time_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    limit_bytes: int | None = None  # of its device

    @model_validator(mode="after")
    def _check(self) -> MemoryCurve:
        _check_lengths(self, "time_s", "held_bytes")
        return self


class LinkUse(Record):
    """Intervals in which one direction of a link was busy: from `start_s[i]` to `end_s[i]`, one after another."""

    name: str  # "worker 3 sends", "workers 4-7 together send"
    rank: int | None = None  # of the worker whose own link it is; None for a link that several workers share
    sends: bool = True  # away from the worker or workers; false: towards them
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    share: tuple[float, ...] = ()  # mean share of the bandwidth in use; empty: all of it

    @model_validator(mode="after")
    def _check(self) -> LinkUse:
        _check_lengths(self, "start_s", "end_s", *(("share",) if self.share else ()))
        return self


class Timeline(Shown, Record):
    """A run of a plan."""

    schema_version: Literal[1] = 1
    source: Literal["simulated", "measured"]
    model: str
    config: str  # of the plan
    schedule: ScheduleField
    ranks: tuple[tuple[int, ...], ...]  # per stage, the workers that run it
    minibatches: int
    microbatches: int = 1  # per minibatch
    microbatch_size: int | None = None  # samples
    accumulate: Annotated[int, Field(ge=1)] = 1  # minibatches per replica between two updates, under 1f1b
    events: Events
    memory: tuple[MemoryCurve, ...] = ()  # empty if not recorded
    links: tuple[LinkUse, ...] = ()  # empty if only workers were recorded

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        source: Literal["simulated", "measured"],
        minibatches: int,
        events: Events,
        **others: Any,
    ) -> Timeline:
        """Return the timeline of a run of `plan`; `others` are further fields."""
        return cls(
            source=source,
            model=plan.model,
            config=plan.config,
            schedule=plan.schedule,
            ranks=tuple(stage.ranks for stage in plan.stages),
            minibatches=minibatches,
            microbatches=plan.microbatches,
            microbatch_size=plan.microbatch_size,
            events=events,
            **others,
        )

    @property
    def workers(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted({rank for ranks in self.ranks for rank in ranks}))

    @property
    def pipeline_length(self) -> int:
        """Number of stages in the pipeline; any more are further chunks on the same workers."""
        return len(set(self.ranks))

    @property
    def span_s(self) -> float:
        """Time from 0 to the end of the last event."""
        return max(self.events.end_s, default=0.0)

    def name_of(self, event: Event) -> str:
        """Return the event's name in drawings: "F3", "B3.1" for microbatch 1 of minibatch 3, "F3'" in a second chunk.

        F is forward, R recomputation, B backward (or its part for inputs), W the backward's part for weights, U update,
        S all-reduce (sum), A a message of activations, G one of gradients.
        """
        once = event.kind in ("update", "all_reduce", "all_gather") or self.microbatches == 1
        unit = f"{event.minibatch}" if once else f"{event.minibatch}.{event.microbatch}"
        return f"{LETTERS[event.kind]}{unit}" + "'" * (event.stage // self.pipeline_length)

    @model_validator(mode="after")
    def _check(self) -> Timeline:
        for number, (rank, stage) in enumerate(zip(self.events.rank, self.events.stage, strict=True)):
            if not 0 <= stage < len(self.ranks) or rank not in self.ranks[stage]:
                raise ValueError(f"event {number} is of rank {rank} in stage {stage}, which it is not a worker of")
        return self


def load_timeline(path: Path | str) -> Timeline:
    """Read a timeline; raise InputError naming the file, the field and the value that is wrong."""
    return load_record(Timeline, path, InputError, REMEDY)


def save_timeline(timeline: Timeline, path: Path | str) -> None:
    """Write `timeline` to `path` atomically, on one line, because nobody reads this many numbers."""
    write_text(path, timeline.model_dump_json() + "\n")
