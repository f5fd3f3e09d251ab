"""Which process group a message takes, and the order in which groups are made and used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest

from planner.executor.communication.links import LinkGroups, lane_of, lanes_of
from planner.executor.run.loop import all_streams
from planner.schedule.chunked import INTERLEAVED
from planner.schedule.instructions import (
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Send,
    SendActivation,
    Unit,
)
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B, TWO_BW, ZB_H1
from planner.schedule.schedule import Channel, PipelineShape
from planner.workers.groups import DataGroups
from planner.workers.place import CPU

CHUNKED = PipelineShape(
    ((0,), (1,)) * 2,
    tuple(Channel(stage, stage + 1) for stage in range(3)),
    INTERLEAVED,
    microbatches=2,
)
STRAIGHT = PipelineShape(((0,), (1,)), (Channel(0, 1),), ONE_F_ONE_B)
REPLICATED = PipelineShape(
    ((0, 1, 2), (3, 4), (5,)), (Channel(0, 1), Channel(1, 2), Channel(0, 2)), ONE_F_ONE_B
)


MANY = [
    PipelineShape(
        ((0, 1, 2), (3, 4), (5,)), (Channel(0, 1), Channel(1, 2), Channel(0, 2)), FLUSH, 53
    ),
    PipelineShape(((0, 1, 2), (3, 4), (5,)), (Channel(0, 1), Channel(1, 2)), ZB_H1, 53),
    PipelineShape(((0, 1, 2), (3, 4)), (Channel(0, 1),), TWO_BW, 53),
    PipelineShape(
        ((0,), (1,), (2,)) * 2, tuple(Channel(s, s + 1) for s in range(5)), INTERLEAVED, 53
    ),
]


class Made(DataGroups):
    """Groups that are only written down, each a number in order of making."""

    def __init__(self, *, tagged: bool) -> None:
        super().__init__(CPU, timedelta(0))
        self.made: list[tuple[int, int] | None] = []
        self.tagged = tagged

    def for_collectives(self, ranks: object) -> Any:
        assert ranks is None
        return self._note(None)

    def for_messages(self, sender: int, receiver: int) -> Any:
        return self._note((sender, receiver))

    def _note(self, ranks: tuple[int, int] | None) -> str:
        self.made.append(ranks)
        return f"group {len(self.made)}"


@pytest.mark.parametrize("shape", [CHUNKED, STRAIGHT])
def test_two_groups_do_with_tags(shape: PipelineShape) -> None:
    made = Made(tagged=True)
    groups = LinkGroups(made, all_streams(shape))
    assert made.made == [None, None]
    activations = {groups.of(lane_of(ReceiveActivation(s, Unit(0), s - 1, 0), 1)) for s in (1, 3)}
    assert len(activations) == 1
    assert groups.of(lane_of(ReceiveGradient(0, Unit(0), 1, 1), 0)) not in activations


def test_an_evaluation_sends_on_the_lanes_of_training_without_tags_alone() -> None:
    for tagged in (False, True):
        made = Made(tagged=tagged)
        groups = LinkGroups(made, all_streams(STRAIGHT))
        before = len(made.made)
        forward = LinkGroups(made, all_streams(STRAIGHT), made=groups)
        assert len(made.made) == before + (2 if tagged else 0)
        there = lane_of(SendActivation(0, Unit(0), 1, 1), 0)
        assert (forward.of(there) == groups.of(there)) is not tagged


def test_without_tags_each_direction_between_two_stages_of_two_workers_has_a_group() -> None:
    """Two workers exchange the values of stages 0-1, 1-2 and 2-3 in an order that only each pair
    agrees on.
    """
    made = Made(tagged=False)
    groups = LinkGroups(made, all_streams(CHUNKED))
    assert sorted(made.made, key=str) == [(0, 1)] * 3 + [(1, 0)] * 3
    there = groups.of(lane_of(SendActivation(0, Unit(0), 1, 1), 0))
    assert groups.of(lane_of(ReceiveActivation(1, Unit(0), 0, 0), 1)) == there
    assert groups.of(lane_of(ReceiveActivation(3, Unit(0), 2, 0), 1)) != there


@pytest.mark.parametrize("shape", [CHUNKED, STRAIGHT, REPLICATED, *MANY])
def test_every_message_of_a_long_run_has_its_lane(shape: PipelineShape) -> None:
    """Replicas take turns, so which workers meet follows from the streams, and they repeat."""
    lanes = set(lanes_of(all_streams(shape)))
    for own, stage in shape.first_stages.items():
        sends: Iterator[Instruction] = shape.schedule.stream(shape, stage, own, 40)
        assert all(lane_of(each, own) in lanes for each in sends if isinstance(each, Send))


@pytest.mark.parametrize("shape", MANY)
def test_a_million_microbatches_need_no_longer_streams(shape: PipelineShape) -> None:
    """Workers that start look through all workers' streams, and wait for each other meanwhile."""
    shape = replace(shape, microbatches=2**20 + 1, depths=shape.replicas)
    streams = all_streams(shape)
    assert sum(len(list(islice(stream, 10_000))) for stream in streams.values()) < 10_000
    assert set(lanes_of(all_streams(shape))) == set(
        lanes_of(all_streams(replace(shape, microbatches=53)))
    )


def test_lanes_of_disjoint_workers_stand_side_by_side() -> None:
    """In a chain of eight workers nobody waits for more than the few communicators of its
    neighbours.
    """
    chain = PipelineShape(
        tuple((stage,) for stage in range(8)),
        tuple(Channel(s, s + 1) for s in range(7)),
        ONE_F_ONE_B,
    )
    done: dict[int, int] = {}
    for lane in lanes_of(all_streams(chain)):
        turn = max(done.get(lane.sender, 0), done.get(lane.receiver, 0)) + 1
        done[lane.sender] = done[lane.receiver] = turn
    assert max(done.values()) <= 6
