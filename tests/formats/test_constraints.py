"""Constraints: what they say about layers, and which of them are forbidden cuts."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import InputError
from planner.formats.cluster import Cluster, DeviceKind, Level, flat_cluster
from planner.formats.constraints import Constraints, load_constraints
from tests.samples import layer, profile

MODEL = profile(*(layer(name, output_bytes=1) for name in "abcde"), no_cut_after=("a",))
BRANCHES = profile(*(layer(name, output_bytes=1) for name in "abcd"), edges=[("a", "b"), ("a", "c"), ("b", "d")])


def test_groups_are_closed_over_everything_that_joins() -> None:
    constraints = Constraints(together=(("b", "d"),), no_cut_after=("d",), gpu_of={"c": 1})
    assert constraints.groups(MODEL) == [frozenset({0, 1, 3, 4}), frozenset({2})]


def test_layers_on_one_gpu_share_a_stage() -> None:
    assert Constraints(gpu_of={"c": 1, "e": 1}).groups(MODEL)[1:] == [frozenset({2, 4}), frozenset({3})]


def test_layers_together_forbid_the_cuts_between_them() -> None:
    narrowed = Constraints(together=(("d", "b"),)).as_forbidden_cuts(MODEL, in_order=True)
    assert narrowed is not None
    assert narrowed.no_cut_after == ("a", "b", "c")
    assert Constraints(together=(("a", "c"),)).as_forbidden_cuts(BRANCHES, in_order=False) is None
    neighbours = Constraints(together=(("b", "c"),)).as_forbidden_cuts(BRANCHES, in_order=False)
    assert neighbours is not None
    assert neighbours.no_cut_after == ("b",)
    assert Constraints(stage_of={"a": 0}).as_forbidden_cuts(MODEL, in_order=True) is None


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (Constraints(together=(("a", "z"),)), "layer 'z'"),
        (Constraints(stage_of={"a": 2}), "on stage 2, but 2 GPUs"),
        (Constraints(gpu_of={"a": 5}), "on GPU 5"),
    ],
)
def test_what_does_not_exist_is_named(constraints: Constraints, message: str) -> None:
    with pytest.raises(InputError, match=message):
        constraints.check(MODEL, flat_cluster(2, 1.0))


def test_files_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "constraints.json"
    file.write_text('{"schema_version": 1, "stage_of": {"a": 1}, "together": [["b", "c"]]}')
    assert load_constraints(file) == Constraints(stage_of={"a": 1}, together=(("b", "c"),))
    file.write_text('{"schema_version": 1, "contiguous": true}')
    assert load_constraints(file).empty
    file.write_text('{"schema_version": 1, "contiguous": false}')
    with pytest.raises(InputError, match="contiguous = False: Input should be True"):
        load_constraints(file)
    file.write_text('{"schema_version": 1, "pins": {}}')
    with pytest.raises(InputError, match="pins"):
        load_constraints(file)


def test_kinds_cover_the_cluster() -> None:
    level = Level(size=3, bandwidth_bytes_per_s=1.0)
    cluster = Cluster(
        levels=(level,), memory_bytes=9, kinds=(DeviceKind(count=2, speed=2.0), DeviceKind(count=1, memory_bytes=5))
    )
    assert [cluster.kind_of(rank).speed for rank in range(3)] == [2.0, 2.0, 1.0]
    assert [cluster.memory_of(kind) for kind in cluster.kinds] == [9, 5]
    with pytest.raises(ValueError, match="kinds of 2 devices are not the 3"):
        Cluster(levels=(level,), kinds=(DeviceKind(count=2),))
