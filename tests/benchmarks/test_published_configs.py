"""The benchmark of published configurations: its table, and the price of a given configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_truth.estimate.__main__ import rank_correlation
from benchmarks.published.configs.__main__ import answer, tables
from benchmarks.published.configs.fixed import best_cuts
from benchmarks.published.configs.rows import ROWS
from planner.cost.layer_costs import LayerCosts
from planner.formats.cluster import flat_cluster
from planner.formats.profile import load_profile
from planner.solver import search_plan as solve

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_best_cuts_of_the_best_configuration_are_the_plans(gpus: int) -> None:
    profile = load_profile(ROOT / "profiles/vgg16/cpu.json")
    cluster = flat_cluster(gpus, 1.25e8)
    plan = solve(profile, cluster, recompute="never")
    fixed = best_cuts(LayerCosts(profile), cluster, plan.replicas)
    assert fixed is not None
    if gpus < 8:
        assert fixed.seconds == pytest.approx(plan.predicted.seconds_per_minibatch)
    else:  # the plan keeps more minibatches in flight than published, and is better balanced for it
        assert plan.predicted.seconds_per_minibatch < fixed.seconds


def test_more_stages_than_layers_have_no_price() -> None:
    profile = load_profile(ROOT / "profiles/lstm_lm/cpu.json")
    assert best_cuts(LayerCosts(profile), flat_cluster(64, 1e9), (1,) * 64) is None


def test_a_row_is_answered() -> None:
    row = next(row for row in ROWS if row.model == "vgg16" and row.config == "7-1")
    found = answer(row)
    assert found.ours is not None
    assert found.ours.predicted.speedup_over_one_gpu > 1
    assert found.implied_bandwidth_bytes_per_s is not None
    assert "vgg16, 1x8 (A)" in tables([found])


def test_rank_correlation() -> None:
    values = np.array([1.0, 2.0, 3.0, 10.0])
    assert rank_correlation(values, values**3) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    # With a tie: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert rank_correlation(np.array([0.0, 5.0, 5.0, 9.0]), values) == pytest.approx(
        4.5 / (4.5 * 5.0) ** 0.5
    )
