"""Computing time: between two events on a GPU, without what the device waited for and without letting the host wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from planner.executor.observe import clock as module
from planner.executor.observe.clock import BusyTime, DeviceTime, busy_time
from planner.executor.observe.progress import Completion, WorkerLog


class Device:
    """A pretended GPU: what is launched ends `behind_s` after the host's clock says now."""

    now_s = 0.0
    reached_s = 0.0
    made = 0
    waits = 0


class PretendEvent:
    """An event that the device passes at the time of its recording."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Device.made += 1
        self.s = 0.0

    def record(self) -> None:
        self.s = Device.now_s

    def query(self) -> bool:
        return self.s <= Device.reached_s

    def synchronize(self) -> None:
        Device.waits += not self.query()
        Device.reached_s = max(Device.reached_s, self.s)

    def elapsed_time(self, end: PretendEvent) -> float:
        assert self.query()
        assert end.query()
        return (end.s - self.s) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    """A pretended GPU at time 0."""
    monkeypatch.setattr(torch.cuda, "Event", PretendEvent)
    for name, value in {"now_s": 0.0, "reached_s": 0.0, "made": 0, "waits": 0}.items():
        monkeypatch.setattr(Device, name, value)
    return Device


def compute(times: DeviceTime, seconds: float, *, completes: bool) -> None:
    """Launch a computation that takes the device so long."""
    times.begin()
    Device.now_s += seconds
    times.end(completes=completes)


def test_a_gpus_computations_are_timed_on_its_own_clock(device: type[Device]) -> None:
    log = WorkerLog()
    times = DeviceTime(log)
    compute(times, 1.0, completes=False)
    device.now_s += 5.0  # the device waits for a message
    compute(times, 2.0, completes=True)
    assert log.busy_s == 0.0  # the device has not come so far
    device.reached_s = device.now_s
    compute(times, 0.5, completes=True)
    assert log.busy_s == 3.0
    times.flush()
    assert device.waits == 1  # at the end alone
    assert log.busy_s == 3.5
    first, second = log.completions
    assert (second.ended_s - first.ended_s, second.busy_s - first.busy_s) == (0.5, 0.5)
    assert first.busy_s == 3.0


def test_events_are_used_again(device: type[Device]) -> None:
    times = DeviceTime(WorkerLog())
    for _ in range(50):
        device.reached_s = device.now_s
        compute(times, 1.0, completes=True)
    assert device.made <= 6


def test_pauses_do_not_count(device: type[Device]) -> None:
    log = WorkerLog()
    times = DeviceTime(log)
    compute(times, 1.0, completes=True)
    device.now_s += 100.0  # an evaluation
    log.paused_s += 100.0
    compute(times, 1.0, completes=True)
    times.flush()
    first, second = log.completions
    assert second.ended_s - first.ended_s == 1.0


def test_a_cpus_computations_have_ended_when_their_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    log = WorkerLog()
    times = busy_time(torch.device("cpu"), log)
    assert isinstance(times, BusyTime)
    moments = iter([1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    for completes in (False, True):
        times.begin()
        times.end(completes=completes)
    times.flush()
    assert log.busy_s == 3.0
    assert list(log.completions) == [Completion(11.0, 3.0)]
