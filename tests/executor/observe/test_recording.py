"""What a recorder keeps, and that it keeps no more."""

from __future__ import annotations

import pytest
import torch

from planner.executor.observe.recording import TraceRecorder
from planner.runtime import HostEvent
from planner.schedule.one_stage import ONE_F_ONE_B
from planner.schedule.schedule import Channel, PipelineShape, stream

SHAPE = PipelineShape(((0,), (1,)), (Channel(0, 1),), ONE_F_ONE_B)


def at(seconds: float) -> HostEvent:
    """Return a mark of that time."""
    event = HostEvent()
    event.s = seconds
    return event


def record(last: int, minibatches: int) -> TraceRecorder:
    recorder = TraceRecorder(0, last, torch.device("cpu"))
    for number, instruction in enumerate(stream(SHAPE, 0, 0, minibatches)):
        recorder.record(instruction, at(number), at(number + 0.5))
    return recorder


def test_the_last_minibatches_are_kept_and_memory_is_bounded() -> None:
    recorder = record(5, 1000)
    units = {event.minibatch for event in recorder.events() if event.kind == "forward"}
    assert units == set(range(995, 1000))
    assert len(recorder._notes) <= 7 * 6


def test_memory_is_recorded_after_each_computation() -> None:
    sizes = iter(range(100, 10_000))
    recorder = TraceRecorder(0, 2, torch.device("cpu"), lambda: next(sizes))
    for number, instruction in enumerate(stream(SHAPE, 0, 0, 10)):
        recorder.record(instruction, at(number), at(number + 0.5))
    computed = [event.end_s for event in recorder.events() if event.lane == "compute"]
    held = list(recorder.held())
    assert [end_s for end_s, _ in held] == computed
    assert [held_bytes - held[0][1] for _, held_bytes in held] == list(range(len(computed)))


def test_a_short_run_is_noted_whole() -> None:
    instructions = list(stream(SHAPE, 0, 0, 2))
    events = list(record(3, 2).events())
    assert len(events) == len(instructions)
    assert events[0].peer_rank is None
    assert [event.start_s for event in events] == pytest.approx(range(len(events)), abs=1e-9)
