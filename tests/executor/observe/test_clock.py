"""Times of instructions on a GPU: by events, which are read at the end, and precise in a long run."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
import torch

from planner.executor.observe import clock
from planner.executor.observe.clock import Clock


class PretendEvent:
    """An event of a device that is at `now_ms`."""

    now_ms = 0.0

    def __init__(self) -> None:
        self.time_ms = PretendEvent.now_ms

    def elapsed_time(self, other: PretendEvent) -> float:
        rounded: tuple[float] = struct.unpack("f", struct.pack("f", other.time_ms - self.time_ms))
        return rounded[0]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    waits: list[object] = []
    monkeypatch.setattr(PretendEvent, "now_ms", 0.0)
    monkeypatch.setattr(clock, "_event", PretendEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    return waits


def test_on_a_cpu_a_mark_is_the_time() -> None:
    clock = Clock(torch.device("cpu"))
    before, mark, after = time.perf_counter(), clock.now(), time.perf_counter()
    assert before <= clock.seconds(mark) <= after


def test_marks_are_read_at_the_end_and_no_device_is_waited_for_in_between(pretended: list[object]) -> None:
    watch = Clock(torch.device("cuda"))
    assert len(pretended) == 1
    marks = []
    for milliseconds in (1.0, 1.5, 4.0):
        PretendEvent.now_ms = milliseconds
        marks.append(watch.now())
    assert len(pretended) == 1
    watch.settle()
    first, second, third = map(watch.seconds, marks)
    assert second - first == pytest.approx(0.5e-3, abs=1e-9)
    assert third - first == pytest.approx(3e-3, abs=1e-9)


def test_a_day_later_microseconds_are_told_apart(pretended: list[object]) -> None:
    watch = Clock(torch.device("cuda"))
    marks = []
    for microseconds in (0, 3, 10):
        PretendEvent.now_ms = 86_400_000.0 + microseconds / 1e3
        marks.append(watch.now())
    first, second, third = map(watch.seconds, marks)
    assert second - first == pytest.approx(3e-6, abs=1e-7)
    assert third - first == pytest.approx(10e-6, abs=1e-7)
