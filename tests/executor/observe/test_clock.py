"""Times of instructions on a GPU: by events, which are read at the end, and precise in a
long run.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest
import torch

from planner.executor.observe.clock import Clock
from tests.runtimes import PretendedDevice, PretendedEvent, registered


class RoundedEvent(PretendedEvent):
    """An event that tells times in single precision."""

    def elapsed_time(self, end_event: PretendedEvent) -> float:
        rounded: tuple[float] = struct.unpack(
            "f", struct.pack("f", super().elapsed_time(end_event))
        )
        return rounded[0]


class Rounding(PretendedDevice):
    """A device with such events."""

    def event(self, *, timing: bool = False) -> RoundedEvent:
        assert timing
        return RoundedEvent(self)


@pytest.fixture
def pretended() -> Iterator[PretendedDevice]:
    device = Rounding()
    with registered("cuda", device):
        yield device


def test_on_a_cpu_a_mark_is_the_time() -> None:
    clock = Clock(torch.device("cpu"))
    before, mark, after = time.perf_counter(), clock.now(), time.perf_counter()
    assert before - 1e-6 <= clock.seconds(mark) <= after + 1e-6


def test_marks_are_read_at_the_end_and_no_device_is_waited_for_in_between(
    pretended: PretendedDevice,
) -> None:
    watch = Clock(torch.device("cuda"))
    assert pretended.synchronized == 1
    marks = []
    for milliseconds in (1.0, 1.5, 4.0):
        pretended.launched_s = milliseconds / 1e3
        marks.append(watch.now())
    assert pretended.synchronized == 1
    watch.settle()
    first, second, third = map(watch.seconds, marks)
    assert second - first == pytest.approx(0.5e-3, abs=1e-9)
    assert third - first == pytest.approx(3e-3, abs=1e-9)


def test_a_day_later_microseconds_are_told_apart(pretended: PretendedDevice) -> None:
    watch = Clock(torch.device("cuda"))
    marks = []
    for microseconds in (0, 3, 10):
        pretended.launched_s = 86_400.0 + microseconds / 1e6
        marks.append(watch.now())
    watch.settle()
    first, second, third = map(watch.seconds, marks)
    assert second - first == pytest.approx(3e-6, abs=1e-7)
    assert third - first == pytest.approx(10e-6, abs=1e-7)
