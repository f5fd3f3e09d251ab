"""Ranks of groups that divide layers between them."""

from __future__ import annotations

from planner.plan.rank_groups import on_ranks, plan_of_tensor_rank, receivers
from tests.executor.plans import in_groups, make_plan
from tests.samples import layer, profile


def test_groups_of_one_size_keep_their_places_beside_idle_ones() -> None:
    assert on_ranks([(1,)], [1]) == [(1,)]
    assert on_ranks([(3,), (1, 0)], [2, 2]) == [(6, 7), (2, 3, 0, 1)]


def test_groups_of_several_sizes_follow_one_another() -> None:
    assert on_ranks([(0, 1), (2,)], [1, 4]) == [(0, 1), (2, 3, 4, 5)]


def test_every_rank_takes_each_value_from_one_rank_of_the_other_group() -> None:
    plan = in_groups(make_plan(profile(*(layer(name) for name in "abc")), (2, 1, 1)), 1, 4, 2)
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3, 4, 5), (6, 7)]
    assert [receivers(plan, 0, 1, 1, 2)] == [[2, 3, 4, 5]]
    assert [receivers(plan, 1, rank, 0, 1) for rank in (2, 3)] == [[1], []]
    assert [receivers(plan, 1, rank, 2, 6) for rank in (2, 3, 4)] == [[6], [7], []]
    assert [receivers(plan, 2, rank, 1, 2) for rank in (6, 7)] == [[2, 4], [3, 5]]
    for rank in range(8):
        stage, own = next(
            (number, each) for number, each in enumerate(plan.stages) if rank in each.ranks
        )
        seen = plan_of_tensor_rank(plan, own.ranks.index(rank) % own.tensor)
        for peer in {stage - 1, stage + 1} & {0, 1, 2}:
            for sender in seen.stages[peer].ranks:
                leaders = own.ranks[:: own.tensor]
                assert any(
                    rank in receivers(plan, peer, sender, stage, leader) for leader in leaders
                )
