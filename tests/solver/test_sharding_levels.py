"""Replicas of the whole model that divide gradients or weights: chosen where that is fastest,
simulated as priced.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import PlannerError, load_plan, price, save_plan, solve
from planner.cost.candidate import StageOptions
from planner.errors import InputError
from planner.exports.transformers import megatron_arguments, torchtitan_config
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.profile import Profile
from planner.options.solving import SolveOptions
from planner.schedule.one_stage import FLUSH
from planner.simulator.simulate_plan import costs_of, simulate, simulated_s
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.evaluate.pipelines import pipeline_for
from tests.samples import layer, profile
from tests.solver.pricing import pricing

LAYERS = [
    layer(
        f"h.{n}", 1, 2, output_bytes=10, weight_bytes=100, update_s=0.5, saved_bytes=100
    ).model_copy(update={"optimizer_bytes": 200, "accumulate_s": 0.1})
    for n in range(8)
]
MODEL = profile(*LAYERS).model_copy(update={"optimizer_elementwise": True})


@pytest.mark.parametrize("bandwidth", [100.0, 1e3, 1e4])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe"])
def test_no_row_of_the_table_that_fits_is_faster_than_the_plan(
    bandwidth: float, schedule: str
) -> None:
    levels = set()
    for memory_bytes in range(1500, 3600, 200):
        plan = solve(
            MODEL, flat_cluster(4, bandwidth, memory_bytes), schedule=schedule, microbatches=8
        )
        levels.add(plan.stages[0].level)
        seconds = plan.predicted.seconds_per_minibatch / plan.microbatches
        rows = [
            row
            for row in plan.baselines
            if row.schedule is plan.schedule and not row.over_memory_bytes
        ]
        assert all(seconds <= row.seconds_per_microbatch * (1 + 1e-9) for row in rows), memory_bytes
        assert plan.lacking_bytes(0) == 0
    assert bandwidth < 1e4 or levels >= {2, 3}


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("recompute", [False, 3, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_simulation_is_the_price(level: int, recompute: bool | int, overlap: bool) -> None:
    own = OwnStage(blocks=8, replicas=4, sharded=True, sharding_level=level, recompute=recompute)
    plan = price(
        MODEL,
        flat_cluster(4, 300.0, overlap=overlap),
        OwnPlan(stages=(own,), schedule=FLUSH, microbatches=8),
    )
    asked = pricing(MODEL, plan.cluster, SolveOptions(schedule=FLUSH, microbatches=8))
    (stage,) = plan.stages
    groups = tuple(
        frozenset(int(name.removeprefix("h.")) for name in group)
        for group in stage.recompute_groups
    )
    candidate = replace(asked.layer_costs.single_stage, options=StageOptions(4, level, groups))
    formula = priced(asked, [candidate])
    assert plan.predicted.seconds_per_minibatch == pytest.approx(formula.seconds, rel=1e-12)
    assert simulated_s(plan) == pytest.approx(formula.seconds, rel=1e-12)
    assert stage.memory == formula.price.memory[0]
    assert max(simulate(plan).memory[0].held_bytes) == plan.memory_bytes(0)
    assert costs_of(plan).stages == pipeline_for(asked, evaluate(asked, [candidate])).stages


@pytest.mark.parametrize("level", [2, 3])
def test_exchanges_between_computations_are_priced_as_measured(level: int) -> None:
    cluster = flat_cluster(4, 1e3, overlap=False)
    rates = {"gather_bandwidth_bytes_per_s": 50.0, "scatter_bandwidth_bytes_per_s": 25.0}
    measured = cluster.levels[0].model_copy(
        update=rates | {"gather_latency_s": 0.01, "scatter_latency_s": 0.02}
    )
    own = OwnStage(blocks=8, replicas=4, sharded=True, sharding_level=level)
    plan = price(
        MODEL,
        cluster.model_copy(update={"levels": (measured,)}),
        OwnPlan(stages=(own,), schedule=FLUSH, microbatches=8),
    )
    # Of eight units: three steps, of a quarter of the bytes each.
    gather_s, scatter_s = 8 * 3 * (25 / 50 + 0.01), 8 * 3 * (25 / 25 + 0.02)
    gathers = 1 if level == 2 else 4
    expected_s = 2 * (8 + 16 + scatter_s) + gathers * gather_s + 0.8 / 4 + 4 / 4
    assert plan.predicted.seconds_per_minibatch == pytest.approx(expected_s)


def test_recomputing_units_are_gathered_whole() -> None:
    held = {}
    for recompute in (False, 8, True):
        own = OwnStage(blocks=8, replicas=4, sharded=True, sharding_level=3, recompute=recompute)
        plan = price(
            MODEL, flat_cluster(4, 300.0), OwnPlan(stages=(own,), schedule=FLUSH, microbatches=8)
        )
        held[recompute] = plan.stages[0].memory.weights_bytes
    assert held == {False: 200 + 200, 8: 200 + 200, True: 200 + 800}


def test_a_file_keeps_the_level_and_older_ones_mean_the_first(tmp_path: object) -> None:
    path = f"{tmp_path}/plan.json"
    own = OwnStage(blocks=8, replicas=4, sharded=True, sharding_level=3)
    plan = price(
        MODEL, flat_cluster(4, 300.0), OwnPlan(stages=(own,), schedule=FLUSH, microbatches=8)
    )
    save_plan(plan, path)
    assert load_plan(path) == plan
    first = price(
        MODEL,
        flat_cluster(4, 300.0),
        1,
        replicas=4,
        shard_optimizer="all",
        schedule=FLUSH,
        microbatches=8,
    )
    assert (plan.stages[0].level, first.stages[0].level) == (3, 1)
    assert "sharding_level" not in first.model_dump_json()


@pytest.mark.parametrize(
    ("stages", "more", "problem"),
    [
        (2, {"replicas": 2}, "only replicas of the whole model"),
        (1, {"schedule": "1f1b"}, "under 1f1b"),
        (1, {"schedule": "2bw", "microbatches": 8}, "under 2bw"),
        (1, {"microbatches": 6}, "cannot share 6 microbatches equally"),
    ],
)
def test_what_replicas_cannot_divide_is_said(
    stages: int, more: dict[str, object], problem: str
) -> None:
    given = {"schedule": "1f1b-flush", "shard_optimizer": "all:2"} | more
    with pytest.raises(InputError, match=problem):
        price(MODEL, flat_cluster(4, 300.0), stages, **given)  # type: ignore[arg-type]


def compiled(model: Profile) -> Profile:
    return model.model_copy(update={"memory_format": "channels-last"})


def test_levels_need_what_the_executor_runs() -> None:
    def levels(model: Profile, **options: object) -> tuple[int, ...]:
        given = SolveOptions(**({"schedule": FLUSH} | options))  # type: ignore[arg-type]
        return pricing(model, flat_cluster(4, 1e4, 3000), given).sharding.levels

    assert levels(MODEL) == (0, 1, 2, 3)
    assert levels(MODEL, shard_optimizer="always") == (1, 2, 3)
    assert levels(MODEL, shard_optimizer="never") == (0,)
    assert levels(MODEL, schedule="1f1b") == levels(compiled(MODEL)) == (0, 1)


def test_exports() -> None:
    own = OwnStage(blocks=8, replicas=4, sharded=True, sharding_level=3)
    plan = price(
        MODEL, flat_cluster(4, 300.0), OwnPlan(stages=(own,), schedule=FLUSH, microbatches=8)
    )
    with pytest.raises(
        PlannerError, match="Megatron has no form for replicas that shard gradients or weights"
    ):
        megatron_arguments(plan)
    written = torchtitan_config(plan)
    assert "data_parallel_shard_degree=4" in written
    assert 'fsdp_reshard_after_forward="always"' in written
