"""Record the timeline of a real run: each worker records what it did and when, and rank 0 merges the records."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from planner.executor.communication.control import control_group, gather_bytes
from planner.executor.observe.clock import Clock, Mark
from planner.formats.plan import Plan
from planner.formats.timeline import LANES, Event, EventKind, Events, MemoryCurve, Timeline
from planner.schedule.instructions import Instruction, Message, Receive, ReceiveShared, Send, SendShared, Unit

_ROUNDS = 8  # round trips per worker to compare clocks; the fastest of them counts


@dataclass(frozen=True)
class Window:
    """The minibatches to record: from `first` to before `end`, or only the `last` ones of the run."""

    first: int = 0
    end: int | None = None
    last: int | None = None

    @classmethod
    def chosen(cls, chosen: tuple[int, int] | int) -> Window:
        """Make a window of (first, end), or of so many minibatches at the end of the run."""
        return cls(last=chosen) if isinstance(chosen, int) else cls(chosen[0], chosen[1], None)


class TraceRecorder:
    """Records instructions in bounded memory, in a few microseconds each.

    Args:
        device: that computes. On a GPU an instruction's time is that of its operations there, by events.
        held_bytes: returns the memory in use, which is recorded after each computation.
    """

    def __init__(
        self, rank: int, window: Window, device: torch.device, held_bytes: Callable[[], int] | None = None
    ) -> None:
        self._rank = rank
        self.window = window
        self._clock = Clock(device)
        self._held_bytes = held_bytes
        self._notes: deque[tuple[int, Instruction, Mark, Mark, int | None]] = deque()
        self._newest = 0

    def mark(self, instruction: Instruction) -> Mark | None:
        """Mark the beginning or the end of `instruction`; None outside the window."""
        return self._clock.now() if self._wanted(_minibatch(instruction, self._newest)) else None

    def record(self, instruction: Instruction, start: Mark | None, end: Mark | None) -> None:
        """Record that `instruction` ran from `start` to `end`."""
        # Updates and all-reduces count rounds, so they go with the newest minibatch.
        minibatch = _minibatch(instruction, self._newest)
        self._newest = max(self._newest, minibatch)
        if start is None or end is None:
            return
        kind = _kind_of(type(instruction).__name__)
        computes = kind is not None and LANES[kind] == "compute"
        held = self._held_bytes() if computes and self._held_bytes is not None else None
        self._notes.append((minibatch, instruction, start, end, held))
        if self.window.last is not None:
            while self._notes[0][0] <= self._newest - self.window.last:
                self._notes.popleft()

    def events(self, first: int = 0) -> Iterator[Event]:
        """Yield what was recorded, on this worker's clock; after the run."""
        self._clock.settle()
        for minibatch, instruction, start, end, _ in self._notes:
            own = isinstance(instruction, Message) and instruction.peer_rank == self._rank
            kind = _kind_of(type(instruction).__name__)
            if kind is not None and minibatch >= first and not own:  # within one worker nothing is sent
                yield _event(self._rank, instruction, kind, self._clock.seconds(start), self._clock.seconds(end))

    def held(self, first: int = 0) -> Iterator[tuple[float, int]]:
        """Yield when memory was looked at and how much it was, on this worker's clock; after the run."""
        self._clock.settle()
        for minibatch, _, _, end, held_bytes in self._notes:
            if held_bytes is not None and minibatch >= first:
                yield self._clock.seconds(end), held_bytes

    def _wanted(self, minibatch: int) -> bool:
        return minibatch >= self.window.first and (self.window.end is None or minibatch < self.window.end)


def gather_timeline(recorder: TraceRecorder, plan: Plan, minibatches: int, accumulate: int = 1) -> Timeline | None:
    """Return the timeline of all workers on rank 0; None elsewhere. All workers call it at the same point.

    Args:
        accumulate: minibatches per replica between two updates, under 1f1b.
    """
    offsets = _clock_offsets()
    # A worker's newest minibatch may be before the run's last, so it may have kept earlier ones than the run's last.
    last = recorder.window.last
    first = 0 if last is None else max(0, minibatches - last)
    own = {"events": [list(event) for event in recorder.events(first)], "held": list(recorder.held(first))}
    gathered = gather_bytes(json.dumps(own).encode())
    if not gathered:
        return None
    parts = [json.loads(part) for part in gathered]
    events = [
        event._replace(start_s=event.start_s + offset, end_s=event.end_s + offset)
        for part, offset in zip(parts, offsets, strict=True)
        for event in (Event(*row) for row in part["events"])
    ]
    start = min((event.start_s for event in events if event.lane == "compute"), default=0.0)
    # Time counts from the first computation: what a worker waited for before it is not of interest.
    moved = [
        event._replace(start_s=max(0.0, event.start_s - start), end_s=event.end_s - start)
        for event in events
        if event.end_s > start
    ]
    memory = tuple(
        MemoryCurve(
            rank=rank,
            time_s=tuple(max(0.0, time_s + offset - start) for time_s, _ in part["held"]),
            held_bytes=tuple(held for _, held in part["held"]),
        )
        for rank, (part, offset) in enumerate(zip(parts, offsets, strict=True))
        if part["held"]
    )
    return Timeline.of_plan(plan, "measured", minibatches, Events.of(moved), accumulate=accumulate, memory=memory)


def _clock_offsets() -> Sequence[float]:
    """Return by rank what to add to that worker's clock to get rank 0's; an empty list elsewhere.

    Cristian (1989), "Probabilistic clock synchronization": the reply is assumed to be sent in the middle of the round
    trip. The fastest round trip is taken, because the error is at most half its length.
    """
    group = control_group()
    here = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() != 0:
        for _ in range(_ROUNDS):
            dist.recv(here, 0, group)
            dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), 0, group)
        return []
    offsets = [0.0]
    for rank in range(1, dist.get_world_size()):
        trips = []
        for _ in range(_ROUNDS):
            asked = time.perf_counter()
            dist.send(here, rank, group)
            dist.recv(here, rank, group)
            answered = time.perf_counter()
            trips.append((answered - asked, (asked + answered) / 2 - float(here)))
        offsets.append(min(trips)[1])
    return offsets


def _minibatch(instruction: Instruction, newest: int) -> int:
    if isinstance(instruction, SendShared | ReceiveShared):
        return newest  # their unit is a round
    unit = getattr(instruction, "unit", None)
    return unit.minibatch if isinstance(unit, Unit) else newest


def _event(rank: int, instruction: Instruction, kind: EventKind, start_s: float, end_s: float) -> Event:
    unit = getattr(instruction, "unit", None)
    if not isinstance(unit, Unit):
        unit = Unit(getattr(instruction, "round"))  # noqa: B009 - an attribute of those that have no unit
    peer = (instruction.peer_rank, instruction.peer_stage) if isinstance(instruction, Send | Receive) else (None, None)
    return Event(rank, kind, instruction.stage, unit.minibatch, unit.microbatch, start_s, end_s, *peer)


@cache
def _kind_of(name: str) -> EventKind | None:
    """Return the kind of event of an instruction's class; None for gradients of shared weights, which are not drawn."""
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    return next((kind for kind in LANES if kind == words), None)
