"""The schedules, drawn by hand."""

from __future__ import annotations

import itertools

import pytest

from planner.errors import InputError
from planner.schedule.chunked import INTERLEAVED, Chunked
from planner.schedule.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Unit,
    Update,
)
from planner.schedule.one_stage import TWO_BW
from planner.schedule.registry import find
from planner.schedule.schedule import Channel, PipelineShape, stream, warm_up_depths
from planner.schedule.zb_v import ZB_V
from tests.schedule.check import ScheduleError, check_streams
from tests.schedule.draw import draw_order


def make_shape(
    replicas: tuple[int, ...], schedule: str, microbatches: int = 1, extra: tuple[Channel, ...] = ()
) -> PipelineShape:
    """Stages on consecutive ranks, each joined to the next, plus `extra` channels."""
    first = list(itertools.accumulate(replicas, initial=0))
    ranks = tuple(tuple(range(first[s], first[s + 1])) for s in range(len(replicas)))
    chain = tuple(Channel(s, s + 1) for s in range(len(replicas) - 1))
    return PipelineShape(ranks, chain + extra, find(schedule), microbatches)


def test_straight_1f1b_alternates_after_a_warm_up_that_shrinks_towards_the_last_stage() -> None:
    assert draw_order(make_shape((1, 1, 1), "1f1b"), 5) == [
        "F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 B3 U3 B4 U4",
        "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 B4 U4",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4",
    ]


def test_replicated_1f1b_deals_minibatches_round_robin_and_updates_per_round() -> None:
    # Five minibatches: the second replica has none in round 2, but joins its update.
    assert draw_order(make_shape((2, 1), "1f1b"), 5) == [
        "F0 F2 B0 U0 F4 B2 U1 B4 U2",
        "F1 F3 B1 U0 B3 U1 U2",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4",
    ]


def test_unequal_replication_2_1_1() -> None:
    assert draw_order(make_shape((2, 1, 1), "1f1b"), 4) == [
        "F0 F2 B0 U0 B2 U1",
        "F1 F3 B1 U0 B3 U1",
        "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3",
    ]


def test_gpipe_runs_all_forwards_before_all_backwards_of_a_minibatch() -> None:
    assert draw_order(make_shape((1, 1), "gpipe", 3), 2) == [
        "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 U0 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 U1",
        "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2 U0 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 U1",
    ]


def test_1f1b_flush_holds_no_more_than_the_depth_and_drains_before_the_update() -> None:
    assert draw_order(make_shape((1, 1), "1f1b-flush", 3), 2) == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 U0 F1.0 F1.1 B1.0 F1.2 B1.1 B1.2 U1",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 U0 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 U1",
    ]


def test_2bw_goes_on_into_the_next_minibatch_before_the_update_of_this_one() -> None:
    assert draw_order(make_shape((1, 1), "2bw", 3), 2) == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 F1.0 B0.2 U0 F1.1 B1.0 F1.2 B1.1 B1.2 U1",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 U0 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 U1",
    ]


def test_2bw_needs_no_third_version_where_the_rule_says_so() -> None:
    for replicas in itertools.product(range(1, 4), repeat=3):
        for microbatches in range(max(replicas), 8):
            shape = make_shape(replicas, "2bw", microbatches)
            depths = list(warm_up_depths(replicas))
            if all(
                TWO_BW.versions_suffice(microbatches, *each)
                for each in zip(replicas, depths, strict=True)
            ):
                assert [shape.in_flight(stage) for stage in range(3)] == depths
                check_streams(shape, 4)


def test_the_checker_finds_a_third_version() -> None:
    shape = PipelineShape(((0,), (1,)), (Channel(0, 1),), TWO_BW, 2, depths=(5, 1))
    with pytest.raises(ScheduleError, match="after 0 updates"):
        check_streams(shape, 4)


def make_interleaved(
    workers: int, chunks: int, microbatches: int, replicas: int = 1, extra: tuple[Channel, ...] = ()
) -> PipelineShape:
    """Stage i on worker i mod `workers`, each stage joined to the next, plus `extra` channels."""
    ranks = tuple(tuple(range(p * replicas, (p + 1) * replicas)) for p in range(workers)) * chunks
    chain = tuple(Channel(s, s + 1) for s in range(workers * chunks - 1))
    return PipelineShape(ranks, chain + extra, INTERLEAVED, microbatches)


def test_interleaved_runs_a_group_of_microbatches_through_one_chunk_after_the_other() -> None:
    """As in figure 4 of the paper, with two workers, two chunks each and four microbatches."""
    assert draw_order(make_interleaved(2, 2, 4), 1) == [
        "F0.0 F0.1 F0.0' F0.1' F0.2 B0.0' F0.3 B0.1' F0.2' B0.0 F0.3' B0.1 B0.2' B0.3' B0.2 B0.3 "
        "U0' U0",
        "F0.0 F0.1 F0.0' B0.0' F0.1' B0.1' F0.2 B0.0 F0.3 B0.1 F0.2' B0.2' F0.3' B0.3' B0.2 B0.3 "
        "U0' U0",
    ]


@pytest.mark.parametrize("schedule", [INTERLEAVED, ZB_V], ids=lambda schedule: schedule.name)
def test_many_groups_have_no_more_in_flight_than_four(schedule: Chunked) -> None:
    """Of 160 microbatches, as counted in the order in which each worker has them."""
    for workers, chunks in ((2, 2), (4, 2), (4, 5) if schedule is INTERLEAVED else (5, 2)):
        flying = dict.fromkeys(range(workers * chunks), 0)
        most = dict(flying)
        for position in range(workers):
            own = schedule.own_stages(position, workers, chunks)
            for work, chunk, _ in schedule.order(workers, chunks, position, 160):
                flying[own[chunk]] += {"F": 1, "B": -1, "I": 0, "W": -1}[work]
                most[own[chunk]] = max(most[own[chunk]], flying[own[chunk]])
        assert schedule.depths((1,) * (workers * chunks), 160, chunks) == tuple(most.values())


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_interleaved_never_deadlocks_whatever_the_microbatches(workers: int) -> None:
    for chunks, replicas, microbatches in itertools.product(range(1, 4), range(1, 4), range(3, 15)):
        skips = (Channel(0, workers), Channel(0, workers + 1, gradient=False)) if chunks > 1 else ()
        check_streams(make_interleaved(workers, chunks, microbatches, replicas, skips), 2)


def test_a_minibatch_of_one_microbatch_runs_alone() -> None:
    assert draw_order(make_shape((1, 1), "1f1b-flush"), 2) == [
        "F0 B0 U0 F1 B1 U1",
        "F0 B0 U0 F1 B1 U1",
    ]


def test_full_stream_of_the_middle_stage() -> None:
    a, b = Unit(0), Unit(1)
    assert list(stream(make_shape((1, 1, 1), "1f1b"), stage=1, rank=1, minibatches=2)) == [
        ReceiveActivation(1, a, 0, 0),
        Forward(1, a),
        SendActivation(1, a, 2, 2),
        ReceiveActivation(1, b, 0, 0),
        Forward(1, b),
        SendActivation(1, b, 2, 2),
        ReceiveGradient(1, a, 2, 2),
        Backward(1, a),
        SendGradient(1, a, 0, 0),
        Update(1, 0),
        ReceiveGradient(1, b, 2, 2),
        Backward(1, b),
        SendGradient(1, b, 0, 0),
        Update(1, 1),
    ]


def test_partial_last_round_averages_over_the_minibatches_it_really_has() -> None:
    shape = make_shape((2, 1), "1f1b")
    reduces = [i for i in stream(shape, 0, 1, 5) if isinstance(i, AllReduce)]
    assert reduces == [
        AllReduce(0, 0, divisor=2),
        AllReduce(0, 1, divisor=2),
        AllReduce(0, 2, divisor=1),
    ]


def test_synchronous_replicas_share_the_microbatches_and_sum() -> None:
    shape = make_shape((2, 1), "gpipe", 3)
    backwards = [i for i in stream(shape, 0, 0, 1) if isinstance(i, (Backward, AllReduce))]
    assert backwards == [
        Backward(0, Unit(0, 0), last_of_round=False),
        Backward(0, Unit(0, 2), last_of_round=True),
        AllReduce(0, 0, divisor=1),
    ]


@pytest.mark.parametrize(
    ("replicas", "depths"),
    [
        ((7, 1), [2, 1]),
        ((2, 1, 1), [2, 2, 1]),
        ((1, 2), [3, 1]),
        ((9, 5, 1, 1), [2, 2, 2, 1]),
        ((8,), [1]),
    ],
)
def test_warm_up_depth_is_noam(replicas: tuple[int, ...], depths: list[int]) -> None:
    assert list(warm_up_depths(replicas)) == depths


@pytest.mark.parametrize("minibatches", [0, 1, 6, 23])
def test_no_configuration_of_up_to_ten_workers_deadlocks(minibatches: int) -> None:
    checked = 0
    for stages in range(1, 5):
        for replicas in itertools.product(range(1, 8), repeat=stages):
            if sum(replicas) <= 10:
                check_streams(make_shape(replicas, "1f1b"), minibatches)
                checked += 1
    assert checked > 300


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush"])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_synchronous_schedules_with_skips_do_not_deadlock(schedule: str, microbatches: int) -> None:
    skips = (Channel(0, 2), Channel(0, 3, gradient=False))
    for replicas in itertools.product(range(1, 4), repeat=4):
        check_streams(make_shape(replicas, schedule, microbatches, skips), 3)


def test_published_configurations_complete() -> None:
    for replicas in [(15, 1), (9, 5, 1, 1), (7, 1), (2, 1, 1), (1,) * 16, (8,)]:
        check_streams(make_shape(replicas, "1f1b"), 100)


def test_the_checker_finds_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward_first(
        shape: PipelineShape, stage: int, rank: int, minibatches: int
    ) -> list[Instruction]:
        instructions = list(stream(shape, stage, rank, minibatches))
        # Stage 0 wants the first gradient before it has sent the first activation.
        return (
            sorted(instructions, key=lambda i: not isinstance(i, ReceiveGradient))
            if stage == 0
            else instructions
        )

    monkeypatch.setattr("tests.schedule.check.stream", lambda *args: iter(backward_first(*args)))
    with pytest.raises(ScheduleError, match="deadlock"):
        check_streams(make_shape((1, 1), "1f1b"), 2)


def test_the_checker_finds_a_computation_without_its_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_receives(
        shape: PipelineShape, stage: int, rank: int, minibatches: int
    ) -> list[Instruction]:
        return [
            i
            for i in stream(shape, stage, rank, minibatches)
            if not isinstance(i, ReceiveActivation)
        ]

    monkeypatch.setattr("tests.schedule.check.stream", lambda *args: iter(without_receives(*args)))
    with pytest.raises(ScheduleError, match=r"rank 1 runs Forward.* without"):
        check_streams(make_shape((1, 1), "1f1b"), 2)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(InputError, match="unknown schedule 'zigzag'"):
        make_shape((1,), "zigzag")
