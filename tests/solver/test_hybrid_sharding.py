"""Groups of replicas that divide weights and repeat each other (HSDP): priced by hand, simulated,
chosen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import Cluster, Plan, PlannerError, load_plan, price, save_plan, solve
from planner.cost.candidate import StageOptions
from planner.cost.communicators import communicators
from planner.errors import InputError
from planner.exports.transformers import megatron_arguments, torchtitan_config
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan_parts import Stage
from planner.formats.profile import Device, Profile
from planner.options.solving import SolveOptions
from planner.reporting.tables.plan import plan_report, stage_table
from planner.schedule.one_stage import FLUSH
from planner.simulator.simulate_plan import costs_of, simulate, simulated_s
from planner.solver.evaluate.evaluation import evaluate, priced
from planner.solver.evaluate.pipelines import pipeline_for
from planner.solver.problem.problem import Problem
from tests.samples import layer, profile
from tests.solver.pricing import pricing
from tests.solver.test_sharding_levels import MODEL

SERVER = 4  # GPUs


def servers(
    inside: float,
    between: float,
    memory_bytes: int | None = None,
    *,
    count: int = 2,
    shared: bool = True,
) -> Cluster:
    flat = flat_cluster(SERVER * count, inside, memory_bytes)
    level = flat.levels[0]
    levels = (
        level.model_copy(update={"size": SERVER}),
        level.model_copy(
            update={"size": count, "bandwidth_bytes_per_s": between, "shared": shared}
        ),
    )
    return flat.model_copy(update={"levels": levels})


def hybrid(
    cluster: Cluster, level: int = 3, microbatches: int = 16, model: Profile = MODEL
) -> Plan:
    own = OwnStage(
        blocks=8, replicas=cluster.gpus, sharded=True, sharding_level=level, shard_group=SERVER
    )
    return price(model, cluster, OwnPlan(stages=(own,), schedule=FLUSH, microbatches=microbatches))


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_exchanges_are_inside_servers_and_an_all_reduce_between_them(
    level: int, shared: bool
) -> None:
    plan = hybrid(servers(50.0, 10.0, shared=shared), level)
    # Eight units of 100 bytes: three steps inside a server, of a quarter of the bytes each.
    gather_s = scatter_s = 8 * 3 * 25 / 50
    # Two servers all-reduce four quarters at once, over one link or four.
    between_s = 8 * (2 * (1 / 2) * 25) / (10 / 4 if shared else 10)
    gathers = 1 if level == 2 else 4
    # Two microbatches, one accumulation, one update, of which each has a quarter.
    expected_s = 2 * (8 + 16 + scatter_s) + gathers * gather_s + between_s + 0.8 / 4 + 4 / 4
    assert plan.predicted.seconds_per_minibatch == pytest.approx(expected_s)

    in_servers = 2 * (SERVER - 1) * (2 * 800 + gathers * 800)
    assert plan.predicted.communication_bytes_per_sample == pytest.approx(
        (in_servers + 2 * 800) / (16 * 4)
    )


@pytest.mark.parametrize(
    ("between", "exposed"), [(1e6, "a bucket"), (1e5, "what exceeds the backward")]
)
def test_all_reduces_overlap_with_the_last_backward(between: float, exposed: str) -> None:
    gpu = Device(kind="cuda", name="imagined", threads=1, context_bytes=0)
    large = [
        layer(f"h.{n}", 1, 2, weight_bytes=10**6, update_s=0.5).model_copy(
            update={"optimizer_bytes": 2 * 10**6}
        )
        for n in range(8)
    ]
    model = profile(*large).model_copy(update={"optimizer_elementwise": True, "device": gpu})
    plan = hybrid(servers(1e9, between, shared=False), 2, model=model)
    scatter_s = gather_s = 8 * 3 * 0.25e6 / 1e9
    between_s = 8 * 0.25e6 / between
    # Four buckets of two layers each are full after 4, 8, 12 and 16 s.
    after_s = between_s / 4 if exposed == "a bucket" else between_s - 12
    assert plan.stages[0].update_s == pytest.approx(4 / 4 + gather_s + after_s)
    assert plan.stages[0].backward_s == pytest.approx(16 + scatter_s / 4)


def test_each_gpu_holds_its_part_of_its_group() -> None:
    memory = hybrid(servers(50.0, 10.0)).stages[0].memory
    assert memory.weights_bytes == 800 / 4 + 2 * 100
    assert memory.gradients_bytes == 800 / 4 + 2 * 100
    assert memory.optimizer_bytes == 1600 / 4


def asked(cluster: Cluster) -> Problem:
    return pricing(MODEL, cluster, SolveOptions(schedule=FLUSH, microbatches=16))


@pytest.mark.parametrize("level", [2, 3])
def test_the_simulation_is_the_price(level: int) -> None:
    plan = hybrid(servers(50.0, 10.0), level)
    question = asked(plan.cluster)
    candidate = replace(
        question.layer_costs.single_stage, options=StageOptions(8, level, group=SERVER)
    )
    formula = priced(question, [candidate])
    assert plan.predicted.seconds_per_minibatch == pytest.approx(formula.seconds, rel=1e-12)
    assert simulated_s(plan) == pytest.approx(formula.seconds, rel=1e-12)
    assert plan.stages[0].memory == formula.price.memory[0]
    assert max(simulate(plan).memory[0].held_bytes) == plan.memory_bytes(0)
    assert costs_of(plan).stages == pipeline_for(question, evaluate(question, [candidate])).stages
    all_of_them = replace(candidate, options=StageOptions(8, level))
    assert communicators(question.layer_costs, [candidate]) == [3]
    assert communicators(question.layer_costs, [all_of_them]) == [2]


def test_it_is_chosen_between_servers_that_are_slow() -> None:
    sharding = {
        between: solve(MODEL, servers(1e4, between, 1900), schedule=FLUSH, microbatches=8)
        .stages[0]
        .sharding
        for between in (2000.0, 100.0)
    }
    assert sharding[2000.0] == (3, 0)
    assert sharding[100.0] == (3, SERVER)


@pytest.mark.parametrize("between", [1e3, 300.0, 100.0, 30.0])
def test_no_row_of_the_table_is_faster_than_the_plan_nor_the_plan_than_its_bound(
    between: float,
) -> None:
    for memory_bytes in range(1300, 2700, 200):
        plan = solve(MODEL, servers(1e4, between, memory_bytes), schedule=FLUSH, microbatches=8)
        rows = [
            row
            for row in plan.baselines
            if row.schedule is plan.schedule and not row.over_memory_bytes
        ]
        seconds = plan.predicted.seconds_per_minibatch
        assert all(seconds <= 8 * row.seconds_per_microbatch * (1 + 1e-9) for row in rows), (
            memory_bytes
        )
        assert any(row.name.startswith("HSDP") for row in plan.baselines)
        assert plan.solver.lower_bound_s <= seconds * (1 + 1e-9)


def test_one_server_and_several_kinds_have_no_groups() -> None:
    flat = asked(flat_cluster(8, 300.0, 3000))
    assert {sharding.group for sharding in flat.shardings(8)} == {0}
    two = asked(servers(300.0, 30.0, 3000))
    assert {sharding.group for sharding in two.shardings(8)} == {0, SERVER}
    assert {sharding.group for sharding in two.shardings(4)} == {0}, (
        "a server has nobody to repeat it"
    )
    assert {sharding.level for sharding in two.shardings(4, stages=2)} == {0, 1}


@pytest.mark.parametrize(
    "model", [MODEL, MODEL.model_copy(update={"optimizer_elementwise": False})]
)
def test_who_may_not_divide_an_optimizer_may_not_divide_gradients(model: Profile) -> None:
    """Bounds ask whether gradients may be divided, and prove less where they may."""
    never = SolveOptions(schedule=FLUSH, microbatches=16, shard_optimizer="never")
    options = never if model is MODEL else SolveOptions(schedule=FLUSH, microbatches=16)
    sharding = pricing(model, servers(300.0, 30.0, 3000), options).sharding
    assert not sharding.optimizer
    assert not sharding.gradients
    assert sharding.levels == (0,)


def test_a_file_keeps_the_groups_and_older_ones_have_none(tmp_path: object) -> None:
    path = f"{tmp_path}/plan.json"
    plan = hybrid(servers(50.0, 10.0))
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert plan.stages[0].sharding == (3, SERVER)
    plain = price(
        MODEL, plan.cluster, 1, replicas=8, shard_optimizer="all:3", schedule=FLUSH, microbatches=8
    )
    assert "shard_group" not in plain.model_dump_json()
    in_words = price(
        MODEL,
        plan.cluster,
        1,
        replicas=8,
        shard_optimizer="all:3/4",
        schedule=FLUSH,
        microbatches=16,
    )
    assert in_words.stages == plan.stages
    assert "1/4" in stage_table(plan).text()
    assert "1/8" in stage_table(plain).text()
    assert "sharding   data parallel, ZeRO-3 in 2 groups of 4, HSDP" in plan_report(plan)
    assert "HSDP" not in plan_report(plain).partition("baselines")[0]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("all:3/3", "8 replicas are no groups of 3"),
        ("all:3/8", "8 replicas are no groups of 8"),
        ("all:1/4", "only replicas that shard gradients or weights do so in groups"),
        ("all:3/x", "does not end with the size of groups"),
    ],
)
def test_what_are_no_groups_is_said(given: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        price(
            MODEL,
            servers(50.0, 10.0),
            1,
            replicas=8,
            shard_optimizer=given,
            schedule=FLUSH,
            microbatches=8,
        )


def test_groups_that_do_not_fill_servers_evenly_are_refused() -> None:
    own = OwnStage(blocks=8, replicas=12, sharded=True, sharding_level=3, shard_group=3)
    with pytest.raises(InputError, match="in 4 groups: groups of 3 ranks do not fill"):
        price(
            MODEL,
            servers(50.0, 10.0, count=3),
            OwnPlan(stages=(own,), schedule=FLUSH, microbatches=12),
        )


def test_a_file_with_other_groups_is_refused() -> None:
    stage = hybrid(servers(50.0, 10.0)).stages[0]
    with pytest.raises(ValueError, match="8 replicas are no groups of 5"):
        Stage.model_validate(stage.model_dump() | {"shard_group": 5})
    with pytest.raises(ValueError, match="only replicas that shard gradients or weights"):
        Stage.model_validate(stage.model_dump() | {"sharding_level": 1})


def test_exports() -> None:
    plan = hybrid(servers(50.0, 10.0))
    with pytest.raises(
        PlannerError, match="Megatron has no form for replicas that shard gradients or weights"
    ):
        megatron_arguments(plan)
    written = torchtitan_config(plan)
    assert "data_parallel_replicate_degree=2" in written
    assert "data_parallel_shard_degree=4" in written
    assert 'fsdp_reshard_after_forward="always"' in written
