"""The figures of real runs that are disturbed."""

from __future__ import annotations

import pytest

from benchmarks.testbed.replan.picture import throughput, throughput_svg
from benchmarks.testbed.replan.real import Row


def row(*, replan: bool, moved_at: list[float]) -> Row:
    """Ten updates a second before 0 and five after it, of 4 samples each."""
    updates = [number / 10 for number in range(-100, 0)]
    updates += [number / 5 for number in range(100)]
    return Row(replan, 4, updates, ["1-1 to 1-1"] * len(moved_at), moved_at, [1.0] * len(moved_at))


def test_rates_are_of_the_time_between_updates() -> None:
    run = row(replan=False, moved_at=[])
    assert run.rate(-10.0, 0.0) == pytest.approx(40.0)
    assert run.rate(0.0, 20.0) == pytest.approx(20.0)


def test_the_curve_counts_samples_of_each_second() -> None:
    curve = throughput(row(replan=False, moved_at=[]))
    assert {rate for at, rate in curve if at < 0} == {40.0}
    assert {rate for at, rate in curve if at > 0} == {20.0}


def test_the_picture_has_a_curve_for_each_run_and_marks_moves() -> None:
    rows = [row(replan=False, moved_at=[]), row(replan=True, moved_at=[5.0, 9.0])]
    picture = throughput_svg(rows, 10.0)
    assert picture.count("<polyline") == 2
    assert picture.count(">moves<") == 2
