"""Constraints: what they say about layers, and which of them are forbidden cuts."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.formats.cluster import Cluster, DeviceKind, Level
from planner.formats.constraints import Constraints
from tests.samples import layer, profile

MODEL = profile(*(layer(name, output_bytes=1) for name in "abcde"), no_cut_after=("a",))
BRANCHES = profile(*(layer(name, output_bytes=1) for name in "abcd"), edges=[("a", "b"), ("a", "c"), ("b", "d")])


def test_groups_are_closed_over_everything_that_joins() -> None:
    constraints = Constraints(together=(("b", "d"),), no_cut_after=("d",))
    assert constraints.groups(MODEL) == [frozenset({0, 1, 3, 4}), frozenset({2})]


def test_layers_together_forbid_the_cuts_between_them() -> None:
    narrowed = Constraints(together=(("d", "b"),)).as_forbidden_cuts(MODEL)
    assert narrowed.no_cut_after == ("a", "b", "c")
    assert Constraints(together=(("a", "c"),)).as_forbidden_cuts(BRANCHES).no_cut_after == ("a", "b")


@pytest.mark.parametrize("constraints", [Constraints(together=(("a", "z"),)), Constraints(no_cut_after=("z",))])
def test_what_does_not_exist_is_named(constraints: Constraints) -> None:
    with pytest.raises(InputError, match="layer 'z'"):
        constraints.check(MODEL)


def test_kinds_cover_the_cluster() -> None:
    level = Level(size=3, bandwidth_bytes_per_s=1.0)
    cluster = Cluster(
        levels=(level,), memory_bytes=9, kinds=(DeviceKind(count=2, speed=2.0), DeviceKind(count=1, memory_bytes=5))
    )
    assert [cluster.kind_of(rank).speed for rank in range(3)] == [2.0, 2.0, 1.0]
    assert [cluster.memory_of(kind) for kind in cluster.kinds] == [9, 5]
    with pytest.raises(ValueError, match="kinds of 2 devices are not the 3"):
        Cluster(levels=(level,), kinds=(DeviceKind(count=2),))
