"""Computing time: between two events on a GPU, without what the device waited for and without
letting the host wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from planner import runtime
from planner.executor.observe.clock import BusyTime
from planner.executor.observe.progress import WorkerLog
from planner.executor.run.worker import Observers, PipelineWorker
from planner.schedule.instructions import Backward, Forward, Instruction, ReceiveActivation, Unit
from planner.workers.heartbeat import Heartbeat
from tests.runtimes import PretendedDevice, registered

GPU = torch.device("cuda")


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    """A pretended GPU at time 0."""
    with registered("cuda", PretendedDevice()):
        yield pretended()


def compute(device: PretendedDevice, times: BusyTime, seconds: float, *, completes: bool) -> None:
    """Launch a computation that takes the device so long."""
    times.begin()
    device.launched_s += seconds
    times.end(completes=completes)


def test_a_gpus_computations_are_timed_on_its_own_clock(device: PretendedDevice) -> None:
    log = WorkerLog()
    times = BusyTime(GPU, log)
    compute(device, times, 1.0, completes=False)
    device.launched_s += 5.0  # the device waits for a message
    compute(device, times, 2.0, completes=True)
    assert log.busy_s == 0.0  # the device has not come so far
    device.reached_s = device.launched_s
    compute(device, times, 0.5, completes=True)
    assert log.busy_s == 3.0
    times.flush()
    assert device.waits == 1  # at the end alone
    assert log.busy_s == 3.5
    first, second = log.completions
    assert (second.ended_s - first.ended_s, second.busy_s - first.busy_s) == (0.5, 0.5)
    assert first.busy_s == 3.0


def test_events_are_used_again(device: PretendedDevice) -> None:
    times = BusyTime(GPU, WorkerLog())
    for _ in range(50):
        device.reached_s = device.launched_s
        compute(device, times, 1.0, completes=True)
    assert device.events <= 6


def test_pauses_do_not_count(device: PretendedDevice) -> None:
    log = WorkerLog()
    times = BusyTime(GPU, log)
    compute(device, times, 1.0, completes=True)
    device.launched_s += 100.0  # an evaluation
    log.paused_s += 100.0
    compute(device, times, 1.0, completes=True)
    times.flush()
    first, second = log.completions
    assert second.ended_s - first.ended_s == 1.0


def test_a_cpus_computations_have_ended_when_their_call_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = WorkerLog()
    times = BusyTime(torch.device("cpu"), log)
    moments = iter([1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr(runtime, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    busy = []
    for completes in (True, True):
        times.begin()
        times.end(completes=completes)
        busy.append(log.busy_s)
    assert busy == [2.0, 3.0]
    first, second = log.completions
    assert (second.ended_s - first.ended_s, second.busy_s - first.busy_s) == (8.0, 1.0)


def test_what_the_device_is_at_is_known_by_events(device: PretendedDevice) -> None:
    times = BusyTime(GPU, WorkerLog())
    assert times.at() == (0, None)
    messages = [ReceiveActivation(1, Unit(unit), 0, 0) for unit in range(3)]
    for unit, message in enumerate(messages):
        times.waits = message
        device.launched_s += 5.0  # the device waits for it
        times.begin(Forward(1, Unit(unit)))
        device.launched_s += 1.0
        times.end(completes=False)
    assert times.at() == (0, messages[0])
    device.reached_s = 5.5
    assert times.at() == (0, Forward(1, Unit(0)))
    device.reached_s = 16.0
    assert times.at() == (2, messages[2])
    device.reached_s = device.launched_s
    assert times.at() == (3, None)
    device.launched_s += 1.0
    times.begin(Backward(1, Unit(0)))  # the host is in it, and the device in what was before
    assert times.at() == (3, Backward(1, Unit(0)))
    device.reached_s = device.launched_s
    assert times.at() == (3, None)  # it waits for what the host launches now


class Launching(PipelineWorker):
    """Launches its instructions on a pretended device, which is a second behind."""

    def _execute(self, instruction: Instruction) -> None:
        pretended().launched_s += 1.0


def pretended() -> PretendedDevice:
    found = runtime.runtime_of(GPU)
    assert isinstance(found, PretendedDevice)
    return found


@pytest.mark.parametrize(
    ("reached_s", "words"),
    [
        (0.5, "waiting for the activations of minibatch 3 from worker 0"),
        (1.5, "in the forward of minibatch 3"),
    ],
)
def test_a_workers_page_says_what_its_device_is_at(
    device: PretendedDevice, reached_s: float, words: str
) -> None:
    heartbeat = Heartbeat()
    worker = Launching({}, None, Observers(heartbeat), GPU)  # type: ignore[arg-type]
    worker.run([ReceiveActivation(1, Unit(3), 0, 0), Forward(1, Unit(3)), Backward(1, Unit(3))])
    device.reached_s = reached_s
    beat = heartbeat.read(device=True)
    assert beat.doing == "in the backward of minibatch 3"
    assert beat.device is not None
    assert beat.device.doing == words
