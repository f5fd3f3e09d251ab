"""When instructions began and ended: on a CPU by the host's clock, on a GPU by events on its stream.

A GPU works long after the host has launched something. To wait for it after each instruction would change what is
measured, and would keep the host from posting what other workers wait for. An event is a mark in the device's stream,
whose time is read at the end of the run.
"""

from __future__ import annotations

import time

import torch

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
