"""Devices that are not there, behind the seam that the product uses for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from planner.runtime import Runtime, register, runtime_of


@contextmanager
def registered(kind: str, runtime: Runtime) -> Iterator[None]:
    """Let devices of `kind` do what `runtime` says, in all threads, until the end."""
    before = runtime_of(kind)
    register(kind, runtime)
    try:
        yield
    finally:
        register(kind, before)


class PretendedDevice(Runtime):
    """A device whose time the test tells: it is at `reached_s` when the host has launched work
    until `launched_s`.
    """

    asynchronous = True

    def __init__(self) -> None:
        self.launched_s = self.reached_s = 0.0
        self.events = 0  # made so far
        self.waits = 0  # for an event that the device had not passed
        self.synchronized = 0

    def event(self, *, timing: bool = False) -> PretendedEvent:
        self.events += 1
        return PretendedEvent(self)

    def anchor(self, device: object) -> tuple[PretendedEvent, float]:
        event = self.event(timing=True)
        event.record()
        self.synchronize(device)
        return event, event.s

    def synchronize(self, device: object) -> None:
        self.synchronized += 1
        self.reached_s = self.launched_s

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class PretendedEvent:
    """An event that the device passes at the time at which it was recorded."""

    def __init__(self, device: PretendedDevice) -> None:
        self._device = device
        self.s = 0.0

    def record(self) -> None:
        self.s = self._device.launched_s

    def query(self) -> bool:
        return self.s <= self._device.reached_s

    def synchronize(self) -> None:
        self._device.waits += not self.query()
        self._device.reached_s = max(self._device.reached_s, self.s)

    def elapsed_time(self, end_event: PretendedEvent) -> float:
        assert self.query()
        assert end_event.query()
        return (end_event.s - self.s) * 1e3
