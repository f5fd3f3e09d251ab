"""The timeline of a real run: every worker notes what it did and when, and rank 0 puts the notes together."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from planner.executor.communication.collect import gather_bytes
from planner.formats.plan import Plan
from planner.formats.timeline import LANES, Event, Events, Kind, Timeline
from planner.schedule.instructions import Instruction, Message, Receive, ReceiveShared, Send, SendShared, Unit

_ROUNDS = 8  # messages there and back, per worker, to compare clocks


@dataclass(frozen=True)
class Window:
    """The minibatches to note: those from `first` on and before `end`, or else the last `last`."""

    first: int = 0
    end: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, chosen: tuple[int, int] | int) -> Window:
        """(first, end), or how many at the end of the run."""
        return cls(last=chosen) if isinstance(chosen, int) else cls(chosen[0], chosen[1], None)


class TraceRecorder:
    """Notes instructions in a bounded memory: some microseconds each.

    Args:
        rank: of this worker.
        window: what to note.
        device: where it computes. On a GPU each noted instruction is waited for, so that its time is its own: the
            noted minibatches are somewhat slower than others.
    """

    def __init__(self, rank: int, window: Window, device: torch.device) -> None:
        self._rank = rank
        self._window = window
        self._device = device
        self._notes: deque[tuple[int, Instruction, float, float]] = deque()
        self._newest = 0

    def settle(self, instruction: Instruction) -> None:
        """Called when `instruction` has been started: on a GPU, wait for its end."""
        if self._device.type == "cuda" and self._wanted(_minibatch(instruction, self._newest)):
            torch.cuda.synchronize(self._device)

    def record(self, instruction: Instruction, start_s: float, end_s: float) -> None:
        """`instruction` ran from `start_s` to `end_s` on `time.perf_counter`'s clock."""
        # Updates and all-reduces count rounds: they belong to the minibatches around them.
        minibatch = _minibatch(instruction, self._newest)
        self._newest = max(self._newest, minibatch)
        if not self._wanted(minibatch):
            return
        self._notes.append((minibatch, instruction, start_s, end_s))
        if self._window.last is not None:
            while self._notes[0][0] <= self._newest - self._window.last:
                self._notes.popleft()

    def events(self, first_noted: int = 0) -> Iterator[Event]:
        """What was noted, in this worker's time."""
        for minibatch, instruction, start_s, end_s in self._notes:
            own = isinstance(instruction, Message) and instruction.peer_rank == self._rank
            kind = _kind_of(type(instruction).__name__)
            if kind is not None and minibatch >= first_noted and not own:  # within one worker nothing travels
                yield _event(self._rank, instruction, kind, start_s, end_s)

    def _wanted(self, minibatch: int) -> bool:
        return minibatch >= self._window.first and (self._window.end is None or minibatch < self._window.end)


def gather_timeline(
    recorder: TraceRecorder,
    plan: Plan,
    minibatches: int,
    window: Window,
    wire: torch.device,
    accumulate: int = 1,
) -> Timeline | None:
    """The timeline of all workers, on rank 0; None elsewhere. All workers call it at the same point.

    Args:
        recorder: this worker's.
        plan: that runs.
        minibatches: of the run.
        window: what was noted.
        wire: device of the messages.
        accumulate: minibatches per replica between two updates, under 1f1b.
    """
    offsets = _clock_offsets(wire)
    # Each worker has kept the last ones that it saw; the last of the run are fewer.
    first_noted = 0 if window.last is None else max(0, minibatches - window.last)
    parts = gather_bytes(json.dumps([list(event) for event in recorder.events(first_noted)]).encode(), wire)
    if not parts:
        return None
    events = [
        event._replace(start_s=event.start_s + offset, end_s=event.end_s + offset)
        for part, offset in zip(parts, offsets, strict=True)
        for event in (Event(*row) for row in json.loads(part))
    ]
    start = min((event.start_s for event in events if event.lane == "compute"), default=0.0)
    # What a worker waited for before the first computation is of no interest, and has no time: they count from there.
    moved = [
        event._replace(start_s=max(0.0, event.start_s - start), end_s=event.end_s - start)
        for event in events
        if event.end_s > start
    ]
    return Timeline.of_plan(plan, "measured", minibatches, Events.of(moved), accumulate=accumulate)


def _clock_offsets(wire: torch.device) -> Sequence[float]:
    """By rank, what to add to that worker's clock to get rank 0's; an empty list elsewhere.

    Cristian (1989): the answer to the fastest of some requests was given in the middle of its round trip.
    """
    here = torch.zeros(1, dtype=torch.float64, device=wire)
    if dist.get_rank() != 0:
        for _ in range(_ROUNDS):
            dist.recv(here, 0)
            dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device=wire), 0)
        return []
    offsets = [0.0]
    for rank in range(1, dist.get_world_size()):
        trips = []
        for _ in range(_ROUNDS):
            asked = time.perf_counter()
            dist.send(here, rank)
            dist.recv(here, rank)
            answered = time.perf_counter()
            trips.append((answered - asked, (asked + answered) / 2 - float(here)))
        offsets.append(min(trips)[1])
    return offsets


def _minibatch(instruction: Instruction, newest: int) -> int:
    if isinstance(instruction, SendShared | ReceiveShared):
        return newest  # their unit is a round
    unit = getattr(instruction, "unit", None)
    return unit.minibatch if isinstance(unit, Unit) else newest


def _event(rank: int, instruction: Instruction, kind: Kind, start_s: float, end_s: float) -> Event:
    unit = getattr(instruction, "unit", None)
    if not isinstance(unit, Unit):
        unit = Unit(getattr(instruction, "round"))  # noqa: B009 - an attribute of those that have no unit
    peer = (instruction.peer_rank, instruction.peer_stage) if isinstance(instruction, Send | Receive) else (None, None)
    return Event(rank, kind, instruction.stage, unit.minibatch, unit.microbatch, start_s, end_s, *peer)


@cache
def _kind_of(name: str) -> Kind | None:
    """None for what timelines do not draw: the gradients of weights that stages share."""
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    return next((kind for kind in LANES if kind == words), None)
