"""The Timeline: what every worker of a pipeline did, and when, simulated or measured.

Made by the simulator and by training runs alike, so that predicted and measured can be laid over each other. It is a
plain record: it knows nothing of who made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from planner.errors import InputError
from planner.formats.files import Record, load_record, write_text
from planner.formats.plan import Plan, ScheduleName

REMEDY = "see timeline.json in the file formats"

EventKind = Literal[
    "forward",
    "recompute",
    "backward",
    "backward_input",  # of schedules that split the backward: what earlier stages wait for
    "backward_weight",  # and the rest of it
    "update",
    "send_activation",
    "send_gradient",
    "receive_activation",
    "receive_gradient",
    "all_reduce",
]
Lane = Literal["compute", "send", "receive", "all-reduce"]

LANES: dict[EventKind, Lane] = {
    "forward": "compute",
    "recompute": "compute",
    "backward": "compute",
    "backward_input": "compute",
    "backward_weight": "compute",
    "update": "compute",
    "send_activation": "send",
    "send_gradient": "send",
    "receive_activation": "receive",
    "receive_gradient": "receive",
    "all_reduce": "all-reduce",
}
LETTERS: dict[EventKind, str] = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "backward_input": "B",
    "backward_weight": "W",
    "update": "U",
    "send_activation": "A",
    "receive_activation": "A",
    "send_gradient": "G",
    "receive_gradient": "G",
    "all_reduce": "S",
}


class Event(NamedTuple):
    """Something that a worker, or one of its links, did from `start_s` to `end_s`.

    Messages: for as long as the bytes are on the link; `peer_rank` and `peer_stage` are at the other end.
    Updates and all-reduces happen once per round: their `minibatch` is the round's number, their `microbatch` 0.
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
        """What of the worker was busy."""
        return LANES[self.kind]


class Events(Record):
    """Events, a list per field: a long run has hundreds of thousands. Times count from the first computation."""

    rank: tuple[int, ...]
    kind: tuple[EventKind, ...]
    stage: tuple[int, ...]
    minibatch: tuple[int, ...]  # of updates and all-reduces: the round
    microbatch: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    peer_rank: tuple[int | None, ...]  # the other end of a message
    peer_stage: tuple[int | None, ...]

    @classmethod
    def of(cls, rows: Iterable[Event]) -> Events:
        """Events one by one, in any order; the record has them by their start."""
        ordered = sorted(rows, key=lambda event: (event.start_s, event.rank, event.end_s))
        columns = zip(*ordered, strict=True) if ordered else ((),) * len(Event._fields)
        fields: dict[str, Any] = dict(zip(Event._fields, columns, strict=True))
        # Built from typed rows: checking hundreds of thousands of them once more would take a second.
        return cls.model_construct(**fields)

    def __len__(self) -> int:
        return len(self.rank)

    def rows(self) -> Iterator[Event]:
        """The events one by one, by their start."""
        return map(Event._make, zip(*(getattr(self, name) for name in Event._fields), strict=True))

    @model_validator(mode="after")
    def _check(self) -> Events:
        lengths = {name: len(getattr(self, name)) for name in Event._fields}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the lists differ in length: {lengths}")
        for number, (start, end) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            if end < start:
                raise ValueError(f"event {number} ends at {end} s, before it starts at {start} s")
        return self


class MemoryCurve(Record):
    """What a worker holds: `held_bytes[i]` from `time_s[i]` on."""

    rank: int
    time_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    limit_bytes: int | None = None  # of its device

    @model_validator(mode="after")
    def _check(self) -> MemoryCurve:
        if len(self.time_s) != len(self.held_bytes):
            raise ValueError(f"{len(self.time_s)} times for {len(self.held_bytes)} sizes")
        return self


class LinkUse(Record):
    """When one direction of a link carried something: from `start_s[i]` to `end_s[i]`, one after the other."""

    name: str  # "worker 3 sends", "workers 4-7 together send"
    rank: int | None = None  # whose own link it is; null for one that several workers share
    sends: bool = True  # away from the worker or workers, or towards them
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    share: tuple[float, ...] = ()  # of the bandwidth, that was used then on average; all of it where none are given

    @model_validator(mode="after")
    def _check(self) -> LinkUse:
        if len(self.start_s) != len(self.end_s):
            raise ValueError(f"{len(self.start_s)} starts for {len(self.end_s)} ends")
        if self.share and len(self.share) != len(self.start_s):
            raise ValueError(f"{len(self.share)} shares for {len(self.start_s)} starts")
        return self


class Timeline(Record):
    """A run of a plan."""

    schema_version: Literal[1] = 1
    source: Literal["simulated", "measured"]
    model: str
    config: str  # replicas per stage, "7-1"
    schedule: ScheduleName
    ranks: tuple[tuple[int, ...], ...]  # per stage, the workers that run it
    minibatches: int
    microbatches: int = 1  # per minibatch
    microbatch_size: int | None = None  # samples
    accumulate: Annotated[int, Field(ge=1)] = 1  # minibatches per replica between two updates, under 1f1b
    events: Events
    memory: tuple[MemoryCurve, ...] = ()  # none where it was not looked at
    links: tuple[LinkUse, ...] = ()  # none where only the workers' ends were looked at

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        source: Literal["simulated", "measured"],
        minibatches: int,
        events: Events,
        *,
        accumulate: int = 1,
        memory: tuple[MemoryCurve, ...] = (),
        links: tuple[LinkUse, ...] = (),
    ) -> Timeline:
        """A run of `plan` that had these `events`."""
        return cls(
            source=source,
            model=plan.model,
            config=plan.config,
            schedule=plan.schedule,
            ranks=tuple(stage.ranks for stage in plan.stages),
            minibatches=minibatches,
            microbatches=plan.microbatches,
            microbatch_size=plan.microbatch_size,
            accumulate=accumulate,
            events=events,
            memory=memory,
            links=links,
        )

    @property
    def workers(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted({rank for ranks in self.ranks for rank in ranks}))

    @property
    def pipeline_length(self) -> int:
        """Stages on workers of their own; those beyond are further chunks of the same workers."""
        return len(set(self.ranks))

    @property
    def span_s(self) -> float:
        """From 0 to the end of the last event."""
        return max(self.events.end_s, default=0.0)

    def name_of(self, event: Event) -> str:
        """As the schedules are drawn: "F3", "B3.1" for microbatch 1 of 3, "F3'" in a worker's second chunk.

        F forward, R recomputation, B backward, W its part for the weights alone, U update, S all-reduce (sum), A
        activations and G gradients of the minibatch.
        """
        once = event.kind in ("update", "all_reduce") or self.microbatches == 1
        unit = f"{event.minibatch}" if once else f"{event.minibatch}.{event.microbatch}"
        return f"{LETTERS[event.kind]}{unit}" + "'" * (event.stage // self.pipeline_length)

    @model_validator(mode="after")
    def _check(self) -> Timeline:
        for number, (rank, stage) in enumerate(zip(self.events.rank, self.events.stage, strict=True)):
            if not 0 <= stage < len(self.ranks) or rank not in self.ranks[stage]:
                raise ValueError(f"event {number} is of rank {rank} in stage {stage}, which it is not a worker of")
        return self


def load_timeline(path: Path | str) -> Timeline:
    """Read a timeline.

    Raises:
        InputError: naming the file, the field and the value that is wrong.
    """
    return load_record(Timeline, path, InputError, REMEDY)


def save_timeline(timeline: Timeline, path: Path | str) -> None:
    """Write `timeline` to `path` atomically, without line breaks: one number per line is for people."""
    write_text(path, timeline.model_dump_json() + "\n")
