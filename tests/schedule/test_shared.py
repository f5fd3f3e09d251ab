"""Weights that several stages share: what the streams exchange, and that any of them completes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.schedule.instructions import (
    AddShared,
    Instruction,
    ReceiveShared,
    SendShared,
    Unit,
    Update,
)
from planner.schedule.schedule import Channel, PipelineShape, stream, warm_up_depths
from tests.examples import examples
from tests.schedule.check import ScheduleError, check_streams
from tests.schedule.test_streams import make_interleaved, make_shape


def shared_parts(
    shape: PipelineShape, stage: int, rank: int, minibatches: int
) -> list[Instruction]:
    kinds = (SendShared, ReceiveShared, AddShared, Update)
    return [i for i in stream(shape, stage, rank, minibatches) if isinstance(i, kinds)]


def test_a_schedule_that_drains_adds_the_gradients_before_the_update() -> None:
    shape = replace(make_shape((1, 1, 1), "gpipe", 2), shared=((0, 2),))
    assert shared_parts(shape, 0, 0, 1) == [
        SendShared(0, Unit(0), 2, 2),
        ReceiveShared(0, Unit(0), 2, 2),
        AddShared(0, 0),
        Update(0, 0),
    ]
    assert shared_parts(shape, 1, 1, 1) == [Update(1, 0)]


def test_under_1f1b_the_last_stage_applies_a_round_when_the_first_has_done_it() -> None:
    """Of three stages the last is two minibatches ahead of the first, and two updates more bring it
    level.
    """
    shape = replace(make_shape((1, 1, 1), "1f1b"), shared=((0, 2),))
    assert [shape.lag(stage) for stage in range(3)] == [0, 0, 2]
    assert [i for i in shared_parts(shape, 2, 2, 3) if not isinstance(i, SendShared)] == [
        Update(2, 0),
        Update(2, 1),
        ReceiveShared(2, Unit(0), 0, 0),
        AddShared(2, 0),
        Update(2, 2),
        ReceiveShared(2, Unit(1), 0, 0),
        AddShared(2, 1),
        Update(2, 3),
        ReceiveShared(2, Unit(2), 0, 0),
        AddShared(2, 2),
        Update(2, 4),
    ]


def test_each_replica_is_told_by_one_replica_of_the_other_stage() -> None:
    shape = replace(make_shape((2, 1, 3), "1f1b-flush", 6), shared=((0, 2),))
    told = [
        (rank, send.peer_rank)
        for rank in (0, 1)
        for send in shared_parts(shape, 0, rank, 1)
        if isinstance(send, SendShared)
    ]
    assert sorted(peer for _, peer in told) == [3, 4, 5]
    check_streams(shape, 3)


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    """Any schedule, replicas, skips, depths, and weights shared by any stages that can
    share them.
    """
    schedule = draw(st.sampled_from(["1f1b", "2bw", "1f1b-flush", "zb-h1", "gpipe", "interleaved"]))
    stages = draw(st.integers(1, 5))
    skips = tuple(
        Channel(*ends, gradient=draw(st.booleans()))
        for ends in combinations(range(stages), 2)
        if ends[1] - ends[0] > 1 and draw(st.booleans())
    )
    if schedule == "interleaved":
        workers, chunks, copies = (draw(st.integers(*ends)) for ends in ((2, 3), (1, 3), (1, 2)))
        shape = make_interleaved(workers, chunks, draw(st.integers(workers * copies, 9)), copies)
    else:
        replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)))
        microbatches = 1 if schedule == "1f1b" else draw(st.integers(max(replicas), 9))
        # else the published depths may deadlock, and the solver looks for others
        if schedule == "2bw":
            microbatches = math.lcm(*replicas) * draw(st.integers(1, 3))
        shape = make_shape(replicas, schedule, microbatches, skips)
    if schedule == "1f1b":
        more = draw(st.integers(0, 2))
        depths = warm_up_depths(shape.replicas)
        shape = replace(shape, depths=(depths[0] + more, *depths[1:]))
    pairs = [
        pair
        for pair in combinations(range(len(shape.ranks)), 2)
        if schedule != "1f1b" or len({len(shape.ranks[stage]) for stage in pair}) == 1
    ]
    shared = tuple(draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4))) if pairs else ()
    return replace(shape, shared=shared)


@settings(deadline=None, max_examples=examples(150))
@given(shape=shapes(), minibatches=st.integers(0, 12))
def test_any_streams_complete_and_no_computation_lacks_its_inputs(
    shape: PipelineShape, minibatches: int
) -> None:
    check_streams(shape, minibatches)


def test_the_checker_finds_an_update_without_the_gradients_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deaf(shape: PipelineShape, stage: int, rank: int, minibatches: int) -> list[Instruction]:
        return [i for i in stream(shape, stage, rank, minibatches) if not isinstance(i, AddShared)]

    monkeypatch.setattr("tests.schedule.check.stream", lambda *args: iter(deaf(*args)))
    with pytest.raises(ScheduleError, match="with shared gradients of round -1, not 0"):
        check_streams(replace(make_shape((1, 1), "gpipe", 2), shared=((0, 1),)), 2)
