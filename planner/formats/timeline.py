"""The Timeline: what every worker of a pipeline did and when, simulated or measured."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import model_validator
from typing_extensions import Self

from planner.errors import InputError
from planner.formats.files import Record, load_record, write_text
from planner.formats.plan import Plan
from planner.formats.plan_parts import ScheduleField
from planner.formats.quantities import Bytes, BytesPerSecond, Number, Parts, Rank, Samples
from planner.formats.shown import Shown

REMEDY = "see timeline.json in the file formats"

EventKind = Literal[
    "forward",
    "recompute",
    "backward",
    # where the schedule splits the backward: gradients of inputs, which earlier stages wait for
    "backward_input",
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

# of the kinds, in their order
_COUNTS: dict[Lane, int] = {"compute": 6, "send": 2, "receive": 2, "all-reduce": 2}
_LANES = [lane for lane, count in _COUNTS.items() for _ in range(count)]
LANES: dict[EventKind, Lane] = dict(zip(get_args(EventKind), _LANES, strict=True))
LETTERS: dict[EventKind, str] = dict(zip(get_args(EventKind), "FRBBWUAGAGSS", strict=True))


class Event(NamedTuple):
    """Something that a worker or one of its links did; what happens once per round has its number
    as `minibatch`.
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
        return LANES[self.kind]


class _Columns(Record):
    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = {
            name: len(value)
            for name, value in self
            if isinstance(value, tuple) and (value or name != "share")
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the lists differ in length: {lengths}")
        return self


class Events(_Columns):
    """Events, as one list per field because there may be hundreds of thousands. The first
    computation is at time 0.
    """

    rank: tuple[Rank, ...]
    kind: tuple[EventKind, ...]
    stage: tuple[Number, ...]
    minibatch: tuple[Number, ...]  # for updates and all-reduces, the round
    microbatch: tuple[Number, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    peer_rank: tuple[Rank | None, ...]  # the other end of a message
    peer_stage: tuple[Number | None, ...]

    @classmethod
    def of(cls, rows: Iterable[Event]) -> "Events":
        """Return the rows as columns, in the order of their starts."""
        ordered = sorted(rows, key=lambda event: (event.start_s, event.rank, event.end_s))
        columns = zip(*ordered, strict=True) if ordered else ((),) * len(Event._fields)
        fields: dict[str, Any] = dict(zip(Event._fields, columns, strict=True))
        # Rows are typed already, and validating hundreds of thousands of them would take a second.
        return cls.model_construct(**fields)

    def __len__(self) -> int:
        return len(self.rank)

    def rows(self) -> Iterator[Event]:
        return map(Event._make, zip(*(getattr(self, name) for name in Event._fields), strict=True))


class MemoryCurve(_Columns):
    """Memory of a worker over time: it holds `held_bytes[i]` from `time_s[i]` on."""

    rank: Rank
    time_s: tuple[float, ...]
    held_bytes: tuple[Bytes, ...]
    limit_bytes: Bytes | None = None  # of its device


class LinkUse(_Columns):
    """Intervals in which one direction of a link was busy: from `start_s[i]` to `end_s[i]`, one
    after another.
    """

    name: str  # "worker 3 sends", "workers 4-7 together send"
    # of the worker whose own link it is; None for a link that several workers share
    rank: Rank | None = None
    sends: bool = True  # away from the worker or workers; false: towards them
    bandwidth_bytes_per_s: BytesPerSecond
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    share: tuple[float, ...] = ()  # mean share of the bandwidth in use; empty: all of it


class Timeline(Shown, Record):
    """A run of a plan."""

    schema_version: Literal[1] = 1
    source: Literal["simulated", "measured"]
    model: str
    config: str  # of the plan
    schedule: ScheduleField
    ranks: tuple[tuple[Rank, ...], ...]  # per stage, the workers that run it
    minibatches: Number
    microbatches: Parts = 1  # per minibatch
    microbatch_size: Samples | None = None
    # always 1; version 0.2 had runs under 1f1b in which replicas updated more rarely
    accumulate: Literal[1] = 1
    length_names: tuple[str, ...] = ()  # of lengths in which microbatches differ
    # of each: its minibatch, its number in that, and its lengths
    lengths: tuple[tuple[int, ...], ...] = ()
    events: Events
    memory: tuple[MemoryCurve, ...] = ()  # empty if not recorded
    links: tuple[LinkUse, ...] = ()  # empty if only workers were recorded
    # of the workers, before what was recorded: why, and how the run went on
    restarts: tuple[str, ...] = ()
    # of a whole run: where its devices and links were not as planned, in sentences
    drift: tuple[str, ...] = ()

    def plot(self, window: tuple[float, float] | None = None, axes: Any = None) -> Any:
        """Draw what workers and links do over time.

        Args:
            window: from when to when, in seconds; None for all.
            axes: of matplotlib, to draw into; without any no plotting library is needed.

        Returns:
            The axes, or a picture that a notebook shows, whose `save("timeline.svg")` writes it.

        Raises:
            InputError: for a window that is no pair of times.
        """
        return import_module("planner.reporting.svg").plot(self, window, axes)

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        source: Literal["simulated", "measured"],
        minibatches: int,
        events: Events,
        **others: Any,
    ) -> "Timeline":
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

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        events = self.events
        stages = [*events.stage, *(stage for stage in events.peer_stage if stage is not None)]
        if max(stages, default=0) >= len(self.ranks):
            raise ValueError(
                f"an event is of stage {max(stages)}, and the last one is {len(self.ranks) - 1}"
            )

        ranks = {*events.rank, *(curve.rank for curve in self.memory)}
        if strange := ranks - set(self.workers):
            raise ValueError(f"worker {min(strange)} runs no stage")
        return self

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted({rank for ranks in self.ranks for rank in ranks}))

    @property
    def pipeline_length(self) -> int:
        """Number of stages in the pipeline; any more are further chunks on the same workers."""
        return len(set(self.ranks))

    @property
    def span_s(self) -> float:
        return max(self.events.end_s, default=0.0)

    def name_of(self, event: Event) -> str:
        """Return the event's name in drawings: "F3", "B3.1" for microbatch 1 of minibatch 3, "F3'"
        in a second chunk.

        F is forward, R recomputation, B backward (or its part for inputs), W the backward's part
        for weights, U update, S all-reduce (sum), A a message of activations, G one of gradients.
        """
        once = event.kind in ("update", "all_reduce", "all_gather") or self.microbatches == 1
        if once:
            unit = f"{event.minibatch}"
        else:
            unit = f"{event.minibatch}.{event.microbatch}"
        return f"{LETTERS[event.kind]}{unit}" + "'" * (event.stage // self.pipeline_length)


def load_timeline(path: Path | str) -> Timeline:
    """Read a timeline; raise InputError naming the file, the field and the value that is wrong."""
    return load_record(Timeline, path, InputError, REMEDY)


def save_timeline(timeline: Timeline, path: Path | str) -> None:
    """Write `timeline` to `path` atomically, on one line, because nobody reads this many
    numbers.
    """
    write_text(path, timeline.model_dump_json() + "\n")
