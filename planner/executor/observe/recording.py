"""Record the timeline of a real run: each worker records what it did and when, and rank 0 merges
the records.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from planner.executor.communication.control import control_group, gather_bytes
from planner.executor.observe.clock import Clock
from planner.formats.plan import Plan
from planner.formats.timeline import LANES, Event, Events, MemoryCurve, Timeline
from planner.runtime import Event as Mark
from planner.schedule.instructions import (
    Instruction,
    Message,
    Receive,
    ReceiveShared,
    Send,
    SendShared,
    Unit,
)

_ROUNDS = 8  # round trips per worker to compare clocks; the fastest of them counts
# By instruction; gradients of shared weights are not drawn.
_KINDS = {"".join(word.title() for word in kind.split("_")): kind for kind in LANES}


class TraceRecorder:
    """Records instructions, and after each computation the memory in use, of the `last` minibatches
    of the run.
    """

    def __init__(
        self,
        rank: int,
        last: int,
        device: torch.device,
        held_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._rank = rank
        self.last = last
        self._clock = Clock(device)
        self._held_bytes = held_bytes
        self._notes: deque[tuple[int, Instruction, Mark, Mark, int | None]] = deque()
        self._newest = 0

    def record(self, instruction: Instruction, start: Mark, end: Mark) -> None:
        """Keep when an instruction began and ended."""
        minibatch = self._minibatch(instruction)
        self._newest = max(self._newest, minibatch)
        kind = _KINDS.get(type(instruction).__name__)
        computes = kind is not None and LANES[kind] == "compute"
        held = self._held_bytes() if computes and self._held_bytes is not None else None
        self._notes.append((minibatch, instruction, start, end, held))
        while self._notes[0][0] <= self._newest - self.last:
            self._notes.popleft()

    def events(self, first: int = 0) -> Iterator[Event]:
        """Yield what was recorded, on this worker's clock; after the run."""
        self._clock.settle()
        for minibatch, instruction, start, end, _ in self._notes:
            kind = _KINDS.get(type(instruction).__name__)
            if kind is None or minibatch < first:
                continue

            peer_rank = peer_stage = None
            if isinstance(instruction, Send | Receive):
                peer_rank = instruction.peer_rank
                peer_stage = instruction.peer_stage
            if isinstance(instruction, Message) and instruction.peer_rank == self._rank:
                continue  # within one worker nothing is sent
            unit: Unit | None = getattr(instruction, "unit", None)
            if unit is None:
                unit = Unit(getattr(instruction, "round"))  # noqa: B009
            yield Event(
                self._rank,
                kind,
                instruction.stage,
                unit.minibatch,
                unit.microbatch,
                self._clock.seconds(start),
                self._clock.seconds(end),
                peer_rank,
                peer_stage,
            )

    def held(self, first: int = 0) -> Iterator[tuple[float, int]]:
        """Yield when memory was looked at and how much it was, on this worker's clock; after the
        run.
        """
        self._clock.settle()
        for minibatch, _, _, end, held_bytes in self._notes:
            if held_bytes is not None and minibatch >= first:
                yield self._clock.seconds(end), held_bytes

    def _minibatch(self, instruction: Instruction) -> int:
        """Return the minibatch of an instruction; the newest one for updates and sums, which count
        rounds.
        """
        if isinstance(instruction, SendShared | ReceiveShared):
            return self._newest
        unit = getattr(instruction, "unit", None)
        return unit.minibatch if isinstance(unit, Unit) else self._newest


def gather_timeline(
    recorder: TraceRecorder,
    plan: Plan,
    minibatches: int,
    lengths_of: Callable[[Unit], Mapping[str, int]] | None = None,
    restarts: Sequence[str] = (),
    drift: Sequence[str] = (),
) -> Timeline | None:
    """Return the timeline of all workers on rank 0; None elsewhere. All workers call it at the same
    point.
    """
    offsets = clock_offsets()
    # A worker's newest minibatch may be before the run's last, so it may have kept earlier ones
    # than the run's last.
    first = max(0, minibatches - recorder.last)
    noted = list(recorder.events(first))
    units = {Unit(event.minibatch, event.microbatch) for event in noted if event.kind == "forward"}
    lengths = {} if lengths_of is None else {unit: lengths_of(unit) for unit in units}
    here = {
        "events": [list(event) for event in noted],
        "held": list(recorder.held(first)),
        "lengths": [(*unit, *by_name.values()) for unit, by_name in lengths.items()],
    }
    parts = [json.loads(part) for part in gather_bytes(json.dumps(here).encode())]
    if not parts:
        return None

    events = [
        _moved(Event(*row), offset)
        for part, offset in zip(parts, offsets, strict=True)
        for row in part["events"]
    ]
    # Time counts from the first computation: what a worker waited for before it is not of interest.
    start_s = min((event.start_s for event in events if event.lane == "compute"), default=0.0)
    counted = [
        event._replace(start_s=max(0.0, event.start_s - start_s), end_s=event.end_s - start_s)
        for event in events
        if event.end_s > start_s
    ]
    memory = []
    for rank, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        if part["held"]:
            memory.append(_memory_curve(rank, part["held"], offset - start_s))

    return Timeline.of_plan(
        plan,
        "measured",
        minibatches,
        Events.of(counted),
        memory=tuple(memory),
        length_names=tuple(next(iter(lengths.values()), ())),
        lengths=tuple(sorted({tuple(row) for part in parts for row in part["lengths"]})),
        restarts=tuple(restarts),
        drift=tuple(drift),
    )


def _moved(event: Event, by_s: float) -> Event:
    """Return an event so many seconds later."""
    return event._replace(start_s=event.start_s + by_s, end_s=event.end_s + by_s)


def _memory_curve(rank: int, held: Sequence[tuple[float, int]], by_s: float) -> MemoryCurve:
    """Return a worker's memory over time, from times on its own clock."""
    return MemoryCurve(
        rank=rank,
        time_s=tuple(max(0.0, time_s + by_s) for time_s, _ in held),
        held_bytes=tuple(held_bytes for _, held_bytes in held),
    )


def clock_offsets() -> Sequence[float]:
    """Return by rank what to add to that worker's clock to get rank 0's; an empty list elsewhere.

    Cristian (1989), "Probabilistic clock synchronization": the error is at most half the fastest
    round trip. An offset within it counts as none: the processes of one host share a clock.
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
        trip, offset = min(trips)
        offsets.append(offset if abs(offset) > trip / 2 else 0.0)

    return offsets
