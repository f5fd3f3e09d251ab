"""Ranks of groups that divide layers between them."""

from __future__ import annotations

from planner.formats.groups import on_ranks


def test_groups_of_one_size_keep_their_places_beside_idle_ones() -> None:
    assert on_ranks([(1,)], [1]) == [(1,)]
    assert on_ranks([(3,), (1, 0)], [2, 2]) == [(6, 7), (2, 3, 0, 1)]


def test_groups_of_several_sizes_follow_one_another() -> None:
    assert on_ranks([(0, 1), (2,)], [1, 4]) == [(0, 1), (2, 3, 4, 5)]
