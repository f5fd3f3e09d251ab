"""What a sampler records of a window, and when it hands that over."""

from __future__ import annotations

import torch

from planner.executor.observe.window_sampler import WindowNotes, WindowSampler
from planner.runtime import HostEvent
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.schedule.schedule import Channel, PipelineShape, stream


def at(seconds: float) -> HostEvent:
    """Return a mark of that time."""
    event = HostEvent()
    event.s = seconds
    return event


def notes_of(shape: PipelineShape, rank: int, minibatches: int, block: int) -> list[WindowNotes]:
    """Return the windows of one worker whose instructions take half a second each."""
    found: list[WindowNotes] = []
    sampler = WindowSampler(rank, torch.device("cpu"), block, found.append)
    stage = shape.stages_of(rank)[0]
    for number, instruction in enumerate(stream(shape, stage, rank, minibatches)):
        if sampler.records(instruction):
            sampler.record(instruction, at(number), at(number + 0.5))
    return found


def test_one_minibatch_in_ten_is_recorded_with_all_that_it_does() -> None:
    shape = PipelineShape(((0,), (1,)), (Channel(0, 1),), FLUSH, microbatches=2)

    first, second = notes_of(shape, 0, 120, block=1)

    assert (first.number, first.first, first.end) == (0, 0, 50)
    assert (second.number, second.first, second.end) == (1, 50, 100)
    assert {event.minibatch for event in first.events} == {4, 14, 24, 34, 44}
    assert {event.minibatch for event in second.events} == {54, 64, 74, 84, 94}
    assert len(first.events) == 5 * 2 * 4  # forward, send, receive, backward
    assert all(event.end_s - event.start_s == 0.5 for event in first.events)


def test_every_replica_has_its_turn() -> None:
    shape = PipelineShape(((0, 1), (2,)), (Channel(0, 1),), ONE_F_ONE_B)
    for rank in range(3):
        windows = notes_of(shape, rank, 122, block=2)
        assert [window.end for window in windows] == [60, 120]
        assert all(window.events for window in windows)
