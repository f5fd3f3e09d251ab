"""Vertical sync: which version of the weights a minibatch uses, and how many a stage holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import flat_cluster
from planner.schedule.instructions import Forward, Update
from planner.schedule.schedule import PipelineShape, stream, warm_up_depths
from planner.schedule.versions import Entry, versions_held
from planner.solver import solve
from tests.examples import examples
from tests.samples import layer, profile
from tests.schedule.check import ScheduleError, check_streams
from tests.schedule.test_streams import make_shape


def in_sync(replicas: tuple[int, ...], depths: tuple[int, ...] | None = None) -> PipelineShape:
    return replace(make_shape(replicas, "1f1b"), vertical_sync=True, depths=depths)


def test_all_stages_of_a_straight_pipeline_run_a_minibatch_at_one_version() -> None:
    shape = in_sync((1, 1, 1))
    for stage in range(3):
        forwards = [i for i in stream(shape, stage, stage, 7) if isinstance(i, Forward)]
        assert [forward.version for forward in forwards] == [0, 0, 0, 1, 2, 3, 4]
        assert shape.versions(stage) == 3


def test_an_update_keeps_what_forwards_to_come_use_and_no_more() -> None:
    """Last of three stages: minibatches 0 to 2 use version 0, and minibatch 3 version 1."""
    updates = [i for i in stream(in_sync((1, 1, 1)), 2, 2, 6) if isinstance(i, Update)]
    assert [update.kept for update in updates] == [(0,), (0, 1), (1, 2), (2, 3), (3,), ()]


def test_with_replicas_a_stage_uses_what_its_whole_rounds_have_left() -> None:
    """7-1: minibatches 7 to 13 enter after no round, 14 to 20 after one, whose seven minibatches stage 1 has done."""
    versions = [i.version for i in stream(in_sync((7, 1)), 1, 7, 28) if isinstance(i, Forward)]
    assert versions == [0] * 14 + [7] * 7 + [14] * 7
    assert versions_held(Entry(7, 2), 1) == 3
    assert [i.version for i in stream(in_sync((2, 3)), 1, 2, 24) if isinstance(i, Forward)] == [0, 0, 0, 1, 2, 3, 4, 5]


@settings(deadline=None, max_examples=examples(60))
@given(
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=4), more=st.integers(0, 2), minibatches=st.integers(0, 40)
)
def test_every_version_is_there_when_it_is_used_and_no_more_than_planned(
    replicas: list[int], more: int, minibatches: int
) -> None:
    first, *others = warm_up_depths(replicas)
    depths = (first + more, *others)
    check_streams(in_sync(tuple(replicas), depths), minibatches)


def test_the_checker_finds_a_version_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(shape: PipelineShape, stage: int, rank: int, minibatches: int) -> list[object]:
        instructions = stream(shape, stage, rank, minibatches)
        return [replace(i, kept=()) if isinstance(i, Update) else i for i in instructions]

    monkeypatch.setattr("tests.schedule.check.stream", lambda *args: iter(forgetful(*args)))
    with pytest.raises(ScheduleError, match="with \\(\\) kept"):
        check_streams(in_sync((1, 1)), 4)


def test_plans_hold_the_versions_of_the_first_stage_within_memory() -> None:
    """Four equal layers on free links: 1-1-1-1 holds 4 versions everywhere, where stashing alone has 4, 3, 2 and 1."""
    model = profile(*(layer(f"l{i}", 1, 2, weight_bytes=100, saved_bytes=1) for i in range(4)))
    plain, synced = (
        solve(model, flat_cluster(4, 1e-3), depth="published", vertical_sync=sync) for sync in (False, True)
    )
    assert plain.config == synced.config == "1-1-1-1"
    assert [stage.memory.weights_bytes for stage in plain.stages] == [400, 300, 200, 100]
    assert [stage.memory.weights_bytes for stage in synced.stages] == [400] * 4
    assert synced.vertical_sync
    assert not plain.vertical_sync
    tight = max(stage.memory.total_bytes for stage in plain.stages)
    for memory_bytes in (tight, tight + 1, 2 * tight):
        plan = solve(model, flat_cluster(4, 1e-3, memory_bytes), vertical_sync=True)
        assert all(stage.memory.total_bytes <= memory_bytes for stage in plan.stages)
    with pytest.raises(InfeasibleError):
        solve(model, flat_cluster(4, 1e-3, 150), vertical_sync=True)


def test_vertical_sync_is_for_1f1b() -> None:
    with pytest.raises(InputError, match="is for the schedule 1f1b, not for gpipe"):
        solve(profile(layer("a", 1, 2)), flat_cluster(2, 1.0), schedule="gpipe", vertical_sync=True)
