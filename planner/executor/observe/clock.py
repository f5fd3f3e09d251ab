"""Time what a worker does by events, which are marks in the order of what its device is given.

A host that launches work on a GPU is back long before the work is done, and must not wait for it.
So events are recorded before and after, and read once the device has passed them. A CPU has passed
them when they are recorded.
"""

from collections import deque
from typing import NamedTuple

import torch

from planner.executor.observe.progress import Completion, WorkerLog
from planner.runtime import Event, runtime_of
from planner.schedule.instructions import Instruction


class _Span(NamedTuple):
    began: Event
    ended: Event
    completes: bool
    paused_s: float
    instruction: Instruction | None
    waits: Instruction | None  # for this, before


class BusyTime:
    """Adds up computing time in a worker's log."""

    def __init__(self, device: torch.device, log: WorkerLog) -> None:
        self._log = log
        self._runtime = runtime_of(device)
        self._coming: deque[_Span] = deque()
        self._free: list[Event] = []
        self._last: Event | None = None  # end of the newest computation that was read
        # its time; times have no common zero, because the log's differences alone mean something
        self._ended_s = 0.0
        self._start: Event | None = None
        self._instruction: Instruction | None = None
        self._read_spans = 0
        # the newest message or all-reduce that the next computation waits for
        self.waits: Instruction | None = None

    def begin(self, instruction: Instruction | None = None) -> None:
        """Note that a computation begins; by default the same instruction's as before, which has
        waited.
        """
        self._instruction = instruction or self._instruction
        self._start = self._recorded()

    def end(self, *, completes: bool) -> None:
        """Note that it ended; `completes` a unit's backward."""
        assert self._start is not None
        span = _Span(
            self._start,
            self._recorded(),
            completes,
            self._log.paused_s,
            self._instruction,
            self.waits,
        )
        self._coming.append(span)
        self._start = self.waits = None
        while self._coming and self._coming[0].ended.query():
            self._read()

    def at(self) -> tuple[int, Instruction | None]:
        """Return how many computations the device has passed, and what it is at, if it has work; of
        any thread.
        """
        passed = self._read_spans
        spans = self._coming.copy()
        start = self._start
        for span in spans:
            if not span.ended.query():
                return (
                    passed,
                    span.instruction if span.began.query() else span.waits or span.instruction,
                )
            passed += 1

        return passed, None if start is None or start.query() else self.waits or self._instruction

    def flush(self) -> None:
        """Bring the log up to date, waiting for the device."""
        while self._coming:
            self._coming[0].ended.synchronize()
            self._read()

    def _recorded(self) -> Event:
        event = self._free.pop() if self._free else self._runtime.event(timing=True)
        event.record()
        return event

    def _read(self) -> None:
        span = self._coming.popleft()
        log = self._log
        self._read_spans += 1
        log.busy_s += span.began.elapsed_time(span.ended) / 1e3
        # From one computation to the next, because an event tells the time since another in single
        # precision.
        self._ended_s += (self._last or span.began).elapsed_time(span.ended) / 1e3
        if span.completes:
            log.completions.append(Completion(self._ended_s - span.paused_s, log.busy_s))
        self._free.append(span.began)
        if self._last is not None:
            self._free.append(self._last)
        self._last = span.ended


class Clock:
    """Marks moments, and tells their times later; the device has nothing to do when the clock is
    made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = runtime_of(device)
        self._base, self._base_s = self._runtime.anchor(device)
        self._anchor: Event | None = None

    def now(self) -> Event:
        """Return a mark of this moment: of when the device comes to what it is given next."""
        event = self._runtime.event(timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all marks have their times; nothing may be under way between workers."""
        self._runtime.synchronize(self._device)

    def seconds(self, mark: Event) -> float:
        """Return the time of a mark on `time.perf_counter`'s clock; after `settle`."""
        # elapsed_time has the precision of a float32: after an hour, a quarter of a millisecond. So
        # times are counted from the first mark that is asked for, which is near the others.
        if self._anchor is None:
            self._anchor = mark
            self._base_s += self._base.elapsed_time(mark) / 1e3
        return self._base_s + self._anchor.elapsed_time(mark) / 1e3

    def move_to(self, mark: Event) -> None:
        """Count times from a mark, in the middle of a run: those of marks near it stay exact."""
        self._base_s = self.seconds(mark)
        self._anchor = mark
