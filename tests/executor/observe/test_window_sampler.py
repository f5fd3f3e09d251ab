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
        assert [window.end for window in windows] == [48, 96]
        recorded = {event.minibatch for event in windows[0].events}
        whole = {n for n in range(48) if n // 2 % 8 == 3}
        assert recorded == {n for n in whole if rank == 2 or n % 2 == rank}


def test_a_short_window_is_recorded_more_densely() -> None:
    shape = PipelineShape(((0,), (1,)), (Channel(0, 1),), FLUSH, microbatches=2)
    found: list[WindowNotes] = []
    sampler = WindowSampler(0, torch.device("cpu"), 1, found.append, window=10)
    for number, instruction in enumerate(stream(shape, 0, 0, 21)):
        if sampler.records(instruction):
            sampler.record(instruction, at(number), at(number + 0.5))
    assert [{event.minibatch for event in window.events} for window in found] == [
        {1, 4, 7},
        {10, 13, 16},
    ]


def test_of_very_many_microbatches_the_first_are_recorded() -> None:
    shape = PipelineShape(((0,), (1,)), (Channel(0, 1),), FLUSH, microbatches=100)
    (window,) = notes_of(shape, 0, 51, block=1)
    assert {event.microbatch for event in window.events} == set(range(32))


class _Pending(HostEvent):
    """A mark that the device passes at some time."""

    passed = False

    def query(self) -> bool:
        return self.passed


def test_what_a_device_has_not_done_yet_comes_with_the_next_window() -> None:
    shape = PipelineShape(((0,), (1,)), (Channel(0, 1),), FLUSH, microbatches=2)
    found: list[WindowNotes] = []
    sampler = WindowSampler(0, torch.device("cpu"), 1, found.append)
    late = _Pending()
    for number, instruction in enumerate(stream(shape, 0, 0, 101)):
        if not sampler.records(instruction):
            continue
        is_late = instruction.unit.minibatch == 44  # type: ignore[union-attr]
        sampler.record(instruction, at(number), late if is_late else at(number + 0.5))
        if found:
            late.passed = True

    first, second = ({event.minibatch for event in window.events} for window in found)
    assert first == {4, 14, 24, 34}
    assert second == {44, 54, 64, 74, 84, 94}


def test_it_says_which_window_it_records() -> None:
    shape = PipelineShape(((0,), (1,)), (Channel(0, 1),), FLUSH, microbatches=2)
    sampler = WindowSampler(0, torch.device("cpu"), 1, lambda _: None, window=10)
    assert sampler.number == -1
    numbers = []
    for instruction in stream(shape, 0, 0, 21):
        sampler.records(instruction)
        numbers.append(sampler.number)
    assert sorted(set(numbers)) == [0, 1, 2]
    assert numbers == sorted(numbers)
