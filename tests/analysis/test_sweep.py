"""Sweeps: each point is what a search for its value finds."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from planner.analysis.sweep import Sweep, spread, sweep
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.profile import load_profile
from planner.reporting.tables.answers import sweep_report
from planner.solver import solve
from tests.samples import layer, profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
# Two equal layers of 6 seconds on two workers: the transfer of 30 bytes takes 30/B each way, a ring of 60 bytes 60/B.
MODEL = profile(layer("a", 2, 4, output_bytes=30, weight_bytes=10), layer("b", 2, 4, weight_bytes=50))


def over_bandwidth() -> Sweep:
    return sweep(MODEL, "bandwidth", spread(1.0, 100.0, 5, whole=False), lambda b: flat_cluster(2, b))


def test_every_point_is_what_solve_says() -> None:
    swept = over_bandwidth()
    assert len({point.config for point in swept.points}) > 1
    for point in swept.points:
        plan = solve(MODEL, flat_cluster(2, point.value))
        assert point.config == plan.config
        assert point.seconds_per_minibatch == plan.predicted.seconds_per_minibatch
        assert point.bottleneck == plan.predicted.bottleneck


def test_no_ratio_to_what_does_not_fit() -> None:
    model = profile(layer("a", 2, 4, output_bytes=30, weight_bytes=1000), layer("b", 2, 4, weight_bytes=1000))
    swept = sweep(model, "bandwidth", [1000.0, 2000.0], lambda b: flat_cluster(2, b, memory_bytes=3500))
    assert all(point.one_gpu_over_memory_bytes and point.data_parallel_over_memory_bytes for point in swept.points)
    text = sweep_report(swept)
    assert text.count("does not fit (") == 4
    assert "x" not in text.replace("does not fit", "")


def test_ratios_beyond_reading_are_words() -> None:
    swept = sweep(MODEL, "bandwidth", [1e-9, 10.0], lambda b: flat_cluster(2, b))
    assert "more than 1,000x" in sweep_report(swept)


def test_more_gpus_are_no_slower() -> None:
    model = load_profile(PROFILES / "vgg16" / "cpu.json")
    swept = sweep(model, "gpus", spread(1, 8, 4, whole=True), lambda n: flat_cluster(int(n), 1.25e8))
    speeds = [point.speedup_over_one_gpu or 0.0 for point in swept.points]
    assert speeds == sorted(speeds)
    assert [point.config for point in swept.points[:2]] == ["1", "1-1"]
    assert "2 GPUs" in sweep_report(swept)


def test_memory_from_too_little_on() -> None:
    def at(memory: float) -> Cluster:
        return flat_cluster(2, 10.0, int(memory))

    swept = sweep(MODEL, "memory", spread(20, 400, 4, whole=False), at)
    first, last = swept.points[0], swept.points[-1]
    assert first.config is None
    assert first.why_not is not None
    assert "no plan fits" in first.why_not
    assert last.config is not None
    assert "none fits" in sweep_report(swept)


def test_a_sweep_in_which_nothing_fits_is_no_answer() -> None:
    with pytest.raises(InfeasibleError, match="at the last, no plan fits 2 GPUs of 30 B") as refused:
        sweep(MODEL, "memory", [20.0, 30.0], lambda memory: flat_cluster(2, 10.0, int(memory)))
    assert "smallest memory" in refused.value.hint


def test_spread() -> None:
    assert spread(2, 16, 16, whole=True) == list(range(2, 17))
    assert spread(1, 1000, 4, whole=False) == pytest.approx([1, 10, 100, 1000])
    assert spread(3, 3, 9, whole=True) == [3]
    few = spread(1, 64, 5, whole=True)
    assert few[0] == 1
    assert few[-1] == 64
    assert all(one < other for one, other in pairwise(few))
    with pytest.raises(InputError, match="backwards"):
        spread(2, 1, 5, whole=False)
    with pytest.raises(InputError, match="1 points"):
        spread(1, 2, 1, whole=False)
