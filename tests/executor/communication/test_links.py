"""Which process group a message takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from planner.executor.communication.links import LinkGroups, route_of
from planner.schedule.instructions import ReceiveActivation, ReceiveGradient, SendActivation, Unit
from planner.schedule.interleaved import INTERLEAVED
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Channel, PipelineShape

CHUNKED = PipelineShape(
    ((0,), (1,)) * 2, tuple(Channel(stage, stage + 1) for stage in range(3)), INTERLEAVED, microbatches=2
)
STRAIGHT = PipelineShape(((0,), (1,)), (Channel(0, 1),), ONE_F_ONE_B)


def make_groups(shape: PipelineShape, *, tags: bool) -> tuple[LinkGroups, list[list[int] | None]]:
    """The groups, each a number in order of making, and what ranks each was made of."""
    made: list[list[int] | None] = []

    def new_group(ranks: Iterable[int] | None) -> Any:
        made.append(None if ranks is None else list(ranks))
        return f"group {len(made)}"

    return LinkGroups.create(shape, new_group, tags=tags), made


@pytest.mark.parametrize(("shape", "tags"), [(INTERLEAVED, True), (STRAIGHT, True), (STRAIGHT, False)])
def test_two_groups_do_with_tags_or_one_pair_of_stages(shape: PipelineShape, tags: bool) -> None:
    groups, made = make_groups(shape, tags=tags)
    assert made == [None, None]
    activation = groups.of(route_of(ReceiveActivation(1, Unit(0), 0, 0)))
    assert activation == groups.activations != groups.of(route_of(ReceiveGradient(0, Unit(0), 1, 1)))


def test_without_tags_each_pair_of_stages_of_the_same_workers_has_groups_of_its_own() -> None:
    """Two workers exchange the values of stages 0-1, 1-2 and 2-3 in an order that only each pair agrees on."""
    groups, made = make_groups(CHUNKED, tags=False)
    assert made == [[0, 1]] * 6 + [None, None]
    there = route_of(SendActivation(0, Unit(0), 1, 1))
    here = route_of(ReceiveActivation(1, Unit(0), 0, 0))
    assert groups.of(there) == groups.of(here)
    assert groups.of(here) != groups.of(route_of(ReceiveActivation(2, Unit(0), 1, 1)))
