"""The chosen plan beside the baselines: priced like any plan, on measured and on published
profiles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.analysis.compare import Comparison, ComparisonRow, compare
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.errors import PlanError
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.profile import Profile, load_profile
from planner.reporting.tables.answers import comparison_report
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from tests.samples import layer, profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
MODEL = profile(
    layer("a", 2, 4, output_bytes=1, saved_bytes=8),
    layer("b", 1, 2, output_bytes=1, weight_bytes=40, saved_bytes=8),
    layer("c", 1, 2, weight_bytes=1000, saved_bytes=8),
)


def compared(model: Profile, cluster: Cluster, **options: Any) -> Comparison:
    return compare(model, solve(model, cluster, **options))


def row(comparison: Comparison, name: str) -> ComparisonRow:
    return next(each for each in comparison.rows if each.name == name)


def test_rows_by_hand() -> None:
    comparison = compared(MODEL, flat_cluster(2, 10.0, 2500))
    chosen, parallel = comparison.rows[0], row(comparison, "data parallel")
    assert (chosen.name, chosen.config) == ("chosen plan", "1-1")
    assert chosen.speedup == pytest.approx(
        parallel.seconds_per_microbatch / chosen.seconds_per_microbatch
    )
    # Two replicas: 2·(1/2)·1040 bytes each per round of two, of 4 samples each.
    assert parallel.communication_bytes_per_sample == pytest.approx(1040 / 4)
    assert chosen.communication_bytes_per_sample == pytest.approx(2 / 4)
    assert chosen.communication_cut == pytest.approx(1 - 2 / 1040)
    assert chosen.idle_share == pytest.approx(1 - 12 / (2 * chosen.seconds_per_microbatch))
    # Weights, gradients, activations; the model has no optimizer state.
    assert parallel.memory_bytes == 1040 * 2 + 24
    assert parallel.over_memory_bytes == 0
    gpipe = row(comparison, "gpipe, same cut")
    assert (gpipe.schedule.name, gpipe.config, gpipe.microbatches) == ("gpipe", "1-1", 8)


def test_a_minibatch_in_samples_is_compared() -> None:
    """All rows have it; that of GPipe on the same cut was once of its own."""
    comparison = compared(MODEL, flat_cluster(2, 10.0), schedule="1f1b-flush", minibatch=24)
    assert comparison.rows[0].microbatches == 24 // 4
    assert {each.samples_per_update for each in comparison.rows} == {(24, 24)}


def test_what_does_not_fit_says_by_how_much() -> None:
    comparison = compared(MODEL, flat_cluster(2, 10.0, 2060))
    parallel = row(comparison, "data parallel")
    assert parallel.over_memory_bytes == 1040 * 2 + 24 - 2060
    assert parallel.speedup is None  # of something that cannot run
    table = comparison_report(comparison).splitlines()
    line = next(line for line in table if line.startswith("data parallel "))
    assert "does not fit (44 B too much)" in line[:60]  # beside the name, where a phone shows it
    assert comparison.rows[0].over_memory_bytes == 0


@pytest.mark.parametrize(
    ("name", "gpus"), [("vgg16", 6), ("gpt2", 2), ("lstm_lm", 6), ("resnet50", 2)]
)
def test_no_baseline_beats_the_plan_on_measured_profiles(name: str, gpus: int) -> None:
    model = load_profile(PROFILES / name / "cpu.json")
    comparison = compared(model, flat_cluster(gpus, 1.25e8))
    chosen = comparison.rows[0]
    for other in comparison.rows[1:]:
        # Pipelines that drain reduce gradients once for all microbatches, so that they may be
        # faster. Sharding is no choice for these profiles, whose optimizers may not be elementwise.
        if other.schedule == chosen.schedule and "ZeRO" not in other.name:
            assert other.seconds_per_microbatch >= chosen.seconds_per_microbatch * (1 - 1e-9), (
                other.name
            )
        assert 0 <= other.idle_share < 1, other.name
    text = comparison_report(comparison)
    assert all(other.name in text for other in comparison.rows)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("gpipe", 8), ("1f1b-flush", 8), ("2bw", 8)]
)
def test_other_schedules(schedule: str, microbatches: int) -> None:
    comparison = compared(
        MODEL, flat_cluster(2, 10.0), schedule=schedule, microbatches=microbatches
    )
    chosen, parallel = comparison.rows[0], row(comparison, "data parallel")
    assert {chosen.schedule.name, parallel.schedule.name} == {schedule}
    assert ("gpipe, same cut" in [row.name for row in comparison.rows]) == (schedule != "gpipe")
    stages = candidates([range(len(MODEL.layers))], [2])
    cost = price(
        LayerCosts(MODEL), stages, Setting(flat_cluster(2, 10.0), find(schedule), microbatches)
    )
    # So few gradients are one bucket, full after the backwards of c and b; the formula has six
    # equal parts.
    late_s = (2 + 2) - 8 / 6
    expected_s = (cost.seconds_per_minibatch + late_s) / microbatches
    assert parallel.seconds_per_microbatch == pytest.approx(expected_s, rel=0.01)


def test_several_levels() -> None:
    comparison = compared(MODEL, hierarchical_cluster((2, 2), (100.0, 10.0)))
    assert row(comparison, "data parallel").config == "4"


def test_gradients_are_as_late_as_the_plan_says() -> None:
    model = load_profile(PROFILES / "vgg16" / "cpu.json")
    plan = solve(model, flat_cluster(4, 1.25e8))  # deeper than the cost model alone would have it
    assert compare(model, plan).rows[0].staleness == plan.staleness == 2


def test_a_plan_of_another_profile_is_refused() -> None:
    plan = solve(MODEL, flat_cluster(2, 10.0))
    assert compare(MODEL, plan).rows[0].config == plan.config
    other: Profile = MODEL.model_copy(update={"model": "other"})
    with pytest.raises(PlanError, match="another profile"):
        compare(other, plan)


def test_an_interleaved_plan_counts_its_workers_and_their_memory() -> None:
    deep = profile(*(layer(f"l{i}", 1, 2, output_bytes=1, weight_bytes=10) for i in range(8)))
    plan = solve(deep, flat_cluster(2, 100.0), schedule="interleaved", microbatches=4)
    comparison = compare(deep, plan)
    chosen = comparison.rows[0]
    assert (chosen.workers, chosen.config) == (plan.workers, plan.config)
    assert chosen.memory_bytes == max(map(plan.memory_bytes, range(len(plan.stages))))
    assert 0 <= chosen.idle_share < 1
    assert {other.schedule.name for other in comparison.rows[1:]} == {"1f1b-flush"}
    assert "all others: 1f1b-flush, one update for 4 microbatches" in comparison_report(comparison)


def test_rows_of_another_schedule_say_how_many_microbatches_they_have() -> None:
    model = load_profile(PROFILES / "vgg16" / "cpu.json")
    report = comparison_report(compare(model, solve(model, flat_cluster(4, 1.25e8))))
    assert "ZeRO-2, ZeRO-3, FSDP: 1f1b-flush, one update for 4 microbatches" in report
    assert "2 equal stages, 4 equal stages: 1f1b-flush, one update for 16 microbatches" in report
