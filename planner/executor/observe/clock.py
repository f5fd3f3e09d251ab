"""Time what a worker does: by the host's clock on a CPU, by events on the device's stream on a GPU.

A host that launches work on a GPU is back long before the work is done. To wait for it after each instruction would
change what is measured, and would keep the host from posting what other workers wait for. So events are recorded before
and after, as marks in the device's stream, and read once the device has passed them: the time between them has no
waiting for messages in it, and reading it waits for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from planner.executor.observe.progress import Completion, WorkerLog


class BusyTime:
    """Adds up computing time in a worker's log; here, of computations that have ended when their call returns."""

    def __init__(self, log: WorkerLog) -> None:
        self._log = log
        self._began_s = 0.0

    def begin(self) -> None:
        """Note that a computation begins."""
        self._began_s = time.perf_counter()

    def end(self, *, completes: bool) -> None:
        """Note that it ended; `completes` a unit's backward."""
        log, ended_s = self._log, time.perf_counter()
        log.busy_s += ended_s - self._began_s
        if completes:
            log.completions.append(Completion(ended_s - log.paused_s, log.busy_s))

    def flush(self) -> None:
        """Bring the log up to date, waiting for the device."""


class _Span(NamedTuple):
    began: torch.cuda.Event
    ended: torch.cuda.Event
    completes: bool
    paused_s: float


class DeviceTime(BusyTime):
    """Times computations on a GPU by events."""

    def __init__(self, log: WorkerLog) -> None:
        super().__init__(log)
        self._coming: deque[_Span] = deque()
        self._free: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None  # end of the newest computation that was read
        self._ended_s = 0.0  # its time; times have no common zero, because the log's differences alone mean something
        self._start: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._start = self._recorded()

    def end(self, *, completes: bool) -> None:
        assert self._start is not None
        self._coming.append(_Span(self._start, self._recorded(), completes, self._log.paused_s))
        while self._coming and self._coming[0].ended.query():  # type: ignore[no-untyped-call]
            self._read()

    def flush(self) -> None:
        while self._coming:
            self._coming[0].ended.synchronize()
            self._read()

    def _recorded(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self) -> None:
        span, log = self._coming.popleft(), self._log
        log.busy_s += span.began.elapsed_time(span.ended) / 1e3
        # From one computation to the next, because an event tells the time since another in single precision.
        self._ended_s += (self._last or span.began).elapsed_time(span.ended) / 1e3
        if span.completes:
            log.completions.append(Completion(self._ended_s - span.paused_s, log.busy_s))
        self._free.append(span.began)
        if self._last is not None:
            self._free.append(self._last)
        self._last = span.ended


def busy_time(device: torch.device, log: WorkerLog) -> BusyTime:
    """Return what times computations on `device`, and writes them to `log`."""
    return DeviceTime(log) if device.type == "cuda" else BusyTime(log)


Mark = float | torch.cuda.Event  # seconds on `time.perf_counter`'s clock, or an event whose time is not yet known


class Clock:
    """Marks moments, and tells their times later.

    Args:
        device: that computes; it has nothing to do when the clock is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_events = device.type == "cuda"
        self._anchor: torch.cuda.Event | None = None
        if self._by_events:
            self._base = _event()
            torch.cuda.synchronize(device)
            self._base_s = time.perf_counter()

    def now(self) -> Mark:
        """Return a mark of this moment: on a GPU, of when it comes to what it is given next."""
        return _event() if self._by_events else time.perf_counter()

    def settle(self) -> None:
        """Wait until all marks have their times; nothing may be under way between workers."""
        if self._by_events:
            torch.cuda.synchronize(self._device)

    def seconds(self, mark: Mark) -> float:
        """Return the time of a mark on `time.perf_counter`'s clock; after `settle`."""
        if isinstance(mark, float):
            return mark
        # elapsed_time has the precision of a float32: after an hour, a quarter of a millisecond. So times are counted
        # from the first mark that is asked for, which is near the others.
        if self._anchor is None:
            self._anchor = mark
            self._base_s += self._base.elapsed_time(mark) / 1e3
        milliseconds: float = self._anchor.elapsed_time(mark)
        return self._base_s + milliseconds / 1e3


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
