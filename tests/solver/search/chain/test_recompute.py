"""Stages that recompute their activations: when, at what price, and holding what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.candidate import Candidate, StageOptions, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.reporting.tables.plan import plan_report
from planner.schedule.one_stage import GPIPE
from planner.solver import search_plan as solve
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.strategies import profiles

# Two layers that keep much and exchange little: what recomputation is for.
HEAVY = profile(
    layer("a", 1, 2, output_bytes=10, weight_bytes=20, saved_bytes=500),
    layer("b", 1, 2, weight_bytes=20, saved_bytes=500),
)
STAGES = [frozenset({0}), frozenset({1})]


def straight(*recompute: bool) -> list[Candidate]:
    return [
        Candidate(
            frozenset(), STAGES[0], StageOptions(1, recompute=whole_stage(STAGES[0], recompute[0]))
        ),
        Candidate(
            STAGES[0], STAGES[1], StageOptions(1, recompute=whole_stage(STAGES[1], recompute[1]))
        ),
    ]


def test_a_stage_that_recomputes_takes_one_more_forward_and_keeps_its_input_only() -> None:
    layer_costs, cluster = LayerCosts(HEAVY), flat_cluster(2, 1000.0)
    plain = price(layer_costs, straight(False, False), Setting(cluster))
    again = price(layer_costs, straight(True, True), Setting(cluster))
    assert (plain.seconds_per_minibatch, again.seconds_per_minibatch) == (3, 4)
    # The first stage has two in flight and no input but the data's; the second has one, and 10
    # bytes of input.
    assert [memory.activations_bytes for memory in plain.memory] == [2 * 500, 500]
    assert [memory.activations_bytes for memory in again.memory] == [500, 10 + 500]
    assert [memory.weights_bytes for memory in again.memory] == [2 * 20, 20]


def test_gpipe_recomputes_every_microbatch() -> None:
    layer_costs, cluster = LayerCosts(HEAVY), flat_cluster(2, 1000.0)
    cost = price(layer_costs, straight(True, False), Setting(cluster, GPIPE, 5))
    assert cost.seconds_per_minibatch == pytest.approx(4 + 3 + 2 * 10 / 1000 + 4 * 4)
    assert [memory.activations_bytes for memory in cost.memory] == [500, 5 * 500]


def test_an_all_reduce_does_not_hide_behind_a_recomputation() -> None:
    model = profile(layer("a", 6, 1, weight_bytes=60))
    # 6 s of all-reduce, of which 1 s may hide
    layer_costs, cluster = LayerCosts(model), flat_cluster(2, 10.0)
    stage = Candidate(frozenset(), frozenset({0}), StageOptions(2, recompute=whole_stage({0})))
    assert price(layer_costs, [stage], Setting(cluster)).seconds_per_minibatch == pytest.approx(
        (6 + 6 + 1 + 6 - 1) / 2
    )


def test_only_the_stage_that_must_recomputes() -> None:
    cluster = flat_cluster(2, 1000.0, 700)
    plan = solve(HEAVY, cluster)
    assert plan.config == "1-1"
    assert [stage.recompute for stage in plan.stages] == [True, False]
    assert plan.predicted.bottleneck.busy_s == 4
    assert plan.stages[0].compute_s == 4
    assert "recomputes" in plan_report(plan)
    roomy = solve(HEAVY, flat_cluster(2, 1000.0, 2000))
    assert not any(stage.recompute for stage in roomy.stages)
    assert "recomputes" not in plan_report(roomy)


def test_never_says_that_recomputing_would_do() -> None:
    heavier = profile(
        *(
            each.model_copy(update={"weight_bytes": 100, "gradient_bytes": 100})
            for each in HEAVY.layers
        )
    )
    with pytest.raises(InfeasibleError) as caught:
        solve(heavier, flat_cluster(2, 1000.0, 900), recompute="never")
    assert "`recompute=auto`" in caught.value.hint
    assert any(stage.recompute for stage in solve(heavier, flat_cluster(2, 1000.0, 900)).stages)


def test_always_recomputes_everywhere() -> None:
    plan = solve(HEAVY, flat_cluster(2, 1000.0), recompute="always")
    assert all(stage.recompute for stage in plan.stages)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-flush", "gpipe"])
@settings(max_examples=examples(60), deadline=None)
@given(model=profiles(), gpus=st.integers(1, 5))
def test_with_memory_enough_nothing_recomputes(schedule: str, model: Profile, gpus: int) -> None:
    microbatches = 4 if schedule in ("gpipe", "1f1b-flush") else 1
    plans = [
        solve(
            model,
            flat_cluster(gpus, 2.0, memory),
            schedule=schedule,
            microbatches=microbatches,
            shard_optimizer="never",
        )
        for memory in (None, 10**9)
    ]
    assert not any(stage.recompute for plan in plans for stage in plan.stages)
    assert plans[0].predicted == plans[1].predicted


@settings(max_examples=examples(60), deadline=None)
@given(model=profiles(), gpus=st.integers(1, 4), memory=st.integers(20, 150))
def test_recomputing_never_makes_a_plan_worse(model: Profile, gpus: int, memory: int) -> None:
    cluster = flat_cluster(gpus, 2.0, memory)
    try:
        without = solve(model, cluster, depth="published", recompute="never")
    except InfeasibleError:
        return
    plan = solve(model, cluster, recompute="auto", depth="published")
    assert plan.predicted.bottleneck.busy_s <= without.predicted.bottleneck.busy_s * (1 + 1e-9)
