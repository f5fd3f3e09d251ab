"""Plans and configurations that are given: priced as the solver prices the same stages, or
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.analysis.given_plan import (
    GivenPlan,
    equal_stages,
    missing_memory,
    price,
    priced_plan,
    stages_ending_at,
)
from planner.cost.candidate import candidates
from planner.errors import InputError, PlanError
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster, hierarchical_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.options.solving import SolveOptions
from planner.plan.blocks import blocks_of
from planner.schedule.one_stage import TWO_BW
from planner.schedule.registry import NAMES, find
from planner.solver import search_plan as solve
from planner.solver.clock import Clock
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.request import Request
from tests.samples import layer, profile
from tests.solver.search.levels.test_columns import in_all_orders

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
FLAT = flat_cluster(4, 1.25e8)
TWO_LEVELS = hierarchical_cluster([2, 2], [1.25e9, 1.25e8])
MODEL = profile(
    layer("a", 1, 2), layer("b", 1, 2), layer("c", 1, 2), layer("d", 1, 2), no_cut_after=("b",)
)


def measured(name: str) -> Profile:
    return load_profile(PROFILES / name / "cpu.json")


def same_as(plan: Plan) -> OwnPlan:
    stages = [
        OwnStage(
            layers=s.layers,
            replicas=s.replicas,
            sharded=s.sharded,
            sharding_level=s.sharding_level,
            recompute=s.recompute if isinstance(s.recompute, bool) else len(s.recompute),
        )
        for s in plan.stages
    ]
    return OwnPlan(
        stages=tuple(stages),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        chunks=max(1, plan.chunks),
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cluster", [FLAT, TWO_LEVELS], ids=["flat", "two levels"])
@pytest.mark.parametrize("model", ["vgg16", "gpt2"])
@pytest.mark.parametrize("schedule", NAMES)
def test_the_solvers_stages_have_the_solvers_price(
    schedule: str, model: str, cluster: Cluster
) -> None:
    known = measured(model)
    microbatches = 8 if find(schedule).divides else 1
    solved = solve(known, cluster, schedule=schedule, microbatches=microbatches, depth="published")
    own = price(known, cluster, same_as(solved))
    assert own.predicted.seconds_per_minibatch == pytest.approx(
        solved.predicted.seconds_per_minibatch, rel=1e-12
    )
    left_out = {"solver", "predicted"}
    assert own.model_dump(exclude=left_out) == solved.model_dump(exclude=left_out)


@pytest.mark.parametrize(
    ("memory_bytes", "config", "level", "recomputes"),
    [
        (1300, "1-1-1-1", 0, True),
        (1450, "4", 3, True),
        (2050, "4", 3, False),
        (3000, "4", 1, False),
    ],
)
def test_what_memory_demands_has_the_solvers_price(
    memory_bytes: int, config: str, level: int, recomputes: bool
) -> None:
    """Eight equal blocks: with less memory the state is divided, then all is, then units recompute,
    then stages.
    """
    layers = [
        layer(f"h.{n}", 1, 2, output_bytes=10, weight_bytes=100, update_s=0.5, saved_bytes=100)
        for n in range(8)
    ]
    model = profile(*(each.model_copy(update={"optimizer_bytes": 200}) for each in layers))
    model = model.model_copy(update={"optimizer_elementwise": True})
    cluster = flat_cluster(4, 1e4, memory_bytes)
    solved = solve(model, cluster, schedule="1f1b-flush", microbatches=8, depth="published")
    assert solved.config == config
    assert {stage.level for stage in solved.stages} == {level}
    assert any(stage.recomputes for stage in solved.stages) == recomputes
    own = price(model, cluster, same_as(solved))
    assert own.stages == solved.stages
    assert own.predicted.seconds_per_minibatch == pytest.approx(
        solved.predicted.seconds_per_minibatch, rel=1e-12
    )


def test_recomputing_stages_cost_a_forward_and_save_memory() -> None:
    known = measured("vgg16")
    stages = equal_stages(known, 2)
    kept = price(known, FLAT, OwnPlan(stages=tuple(stages)))
    again = price(
        known, FLAT, OwnPlan(stages=tuple(s.model_copy(update={"recompute": True}) for s in stages))
    )
    assert again.stages[0].compute_s == pytest.approx(
        kept.stages[0].compute_s + kept.stages[0].forward_s
    )
    assert again.memory_bytes(0) < kept.memory_bytes(0)


def test_units_recompute_and_replicas_divide_the_state() -> None:
    """The first two of six blocks; the plan says which layers, and is priced again from what it
    says.
    """
    known = measured("gpt2")
    cluster = flat_cluster(4, 1.25e8)
    first = OwnStage(blocks=6, replicas=2, recompute=2, sharded=True)
    schedule = find("1f1b-flush")
    own = OwnPlan(stages=(first, OwnStage(blocks=6, replicas=2)), schedule=schedule, microbatches=8)
    plan = price(known, cluster, own)
    blocks = blocks_of(known)[:2]
    assert plan.stages[0].recompute_groups == tuple(
        tuple(known.layers[n].name for n in block) for block in blocks
    )
    again_s = sum(known.layers[n].forward_s for block in blocks for n in block)
    assert plan.stages[0].again_s == pytest.approx(again_s)
    bare = (OwnStage(blocks=6, replicas=2),) * 2
    plain = price(known, cluster, OwnPlan(stages=bare, schedule=schedule, microbatches=8))
    less, more = plan.stages[0].memory, plain.stages[0].memory
    assert less.optimizer_bytes == -(-more.optimizer_bytes // 2)
    assert less.activations_bytes < more.activations_bytes
    assert plan.stages[1] == plain.stages[1]
    given = GivenPlan.of(known, plan, Clock())
    assert given.price().memory == tuple(stage.memory for stage in plan.stages)
    assert evaluate(given.problem, given.stages).seconds == pytest.approx(
        plan.predicted.seconds_per_minibatch, rel=1e-12
    )


@pytest.mark.parametrize(
    ("model", "count", "first"),
    [
        ("gpt2", 12, ("wte", "h.0.mlp.dropout")),
        ("t5", 12, ("encoder.embed_tokens", "encoder.block.0.layer.1.dropout")),
        ("resnet50", 16, ("conv1", "layer1.0.bn3")),
        ("llama", 12, ("model.embed_tokens", "model.layers.0.mlp.down_proj")),
    ],
)
def test_blocks_are_the_elements_of_lists_of_modules(
    model: str, count: int, first: tuple[str, str]
) -> None:
    known = measured(model)
    blocks = blocks_of(known)
    assert len(blocks) == count
    assert tuple(known.layers[index].name for index in (0, blocks[0][-1])) == first
    assert [index for block in blocks for index in block] == list(range(len(known.layers)))


def test_a_model_without_lists_is_one_block() -> None:
    assert blocks_of(MODEL) == [range(4)]


def test_stages_of_equal_length_begin_with_the_longer_ones() -> None:
    assert [stage.blocks for stage in equal_stages(measured("gpt2"), 5)] == [3, 3, 2, 2, 2]


def test_what_does_not_fit_is_priced_and_said() -> None:
    known = measured("vgg16")
    own = OwnPlan(stages=tuple(equal_stages(known, 2)))
    plan = price(known, flat_cluster(2, 1e9, memory_bytes=10**8), own)
    roomy = price(known, flat_cluster(2, 1e9), own)
    assert plan.predicted == roomy.predicted
    assert missing_memory(roomy) is None
    needed = max(plan.memory_bytes(0), plan.memory_bytes(1))
    assert needed > 10**8
    assert "more than 100 MB" in (missing_memory(plan) or "")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [OwnStage(layers=("a", "b")), OwnStage(layers=("c", "x"))],
            "the layer 'x' where the profile",
        ),
        (
            [OwnStage(layers=("c", "d")), OwnStage(layers=("a", "b"))],
            "the layer 'c' where the profile",
        ),
        ([OwnStage(layers=("a",))], "the layer 'None' where the profile of 'sample' has 'b'"),
        (
            [OwnStage(layers=("a", "b")), OwnStage(layers=("c", "d"))],
            "no stage can end after layer 'b'",
        ),
        (
            [OwnStage(blocks=1), OwnStage(layers=("c", "d"))],
            "some stages are described by blocks and some by layers",
        ),
        (
            [OwnStage(blocks=4, recompute=2)],
            "2 blocks are to recompute in the stage from 'a' to 'd', which has 1",
        ),
        ([OwnStage(blocks=2)], "the stages have 2 blocks, and 'sample' has 4"),
        ([OwnStage(layers=("a", "b", "c", "d"), replicas=5)], "need 5 GPUs, and the cluster has 4"),
    ],
)
def test_stages_that_make_no_sense_are_refused(stages: list[OwnStage], message: str) -> None:
    with pytest.raises(InputError) as error:
        price(MODEL, FLAT, OwnPlan(stages=tuple(stages)))
    assert message in error.value.message


def test_cuts_out_of_order_and_too_many_stages_are_refused() -> None:
    with pytest.raises(InputError, match="not the profile's order"):
        stages_ending_at(MODEL, ["c", "a"])
    with pytest.raises(InputError, match="leaves a stage empty"):
        stages_ending_at(MODEL, ["d"])
    with pytest.raises(InputError, match="'sample' has 4 blocks, which do not make 5 stages"):
        equal_stages(MODEL, 5)


def test_a_model_without_lists_of_modules_is_divided_by_its_layers() -> None:
    assert [stage.blocks for stage in equal_stages(MODEL, 3)] == [2, 1, 1]


def test_chunks_need_stages_for_all_and_equal_replicas() -> None:
    three = (OwnStage(layers=("a",)), OwnStage(layers=("b", "c")), OwnStage(layers=("d",)))
    interleaved = find("interleaved")
    with pytest.raises(InputError, match="not a multiple of 2 chunks"):
        price(MODEL, FLAT, OwnPlan(stages=three, schedule=interleaved))
    two = (OwnStage(layers=("a",), replicas=2), OwnStage(layers=("b", "c", "d")))
    with pytest.raises(InputError, match="same number of replicas"):
        price(MODEL, FLAT, OwnPlan(stages=two, schedule=interleaved))


def test_stages_take_the_pace_of_the_slowest_kind_of_their_gpus() -> None:
    kinds = (DeviceKind(count=2, speed=2.0), DeviceKind(count=2, speed=1.0))
    cluster = FLAT.model_copy(update={"kinds": kinds})
    halves = (OwnStage(layers=("a",), replicas=1), OwnStage(layers=("b", "c", "d"), replicas=2))
    alike, plan = (price(MODEL, each, OwnPlan(stages=halves)) for each in (FLAT, cluster))
    fast, both = plan.stages
    assert fast.forward_s == alike.stages[0].forward_s / 2
    assert both.forward_s == alike.stages[1].forward_s
    assert [plan.cluster.kinds_on(stage.ranks) for stage in plan.stages] == [
        "speed 2",
        "speed 2 + speed 1",
    ]


def test_2bw_with_too_few_microbatches_says_how_many_it_takes() -> None:
    """Four stages have up to 4 in flight: with m = 2 that is minibatches t - 1 to t, and t - 2 is
    not done.
    """
    own = OwnPlan(stages=tuple(equal_stages(measured("vgg16"), 4)), schedule=TWO_BW, microbatches=2)
    with pytest.raises(PlanError, match=r"^2 microbatches .* more than its 2 versions") as caught:
        price(measured("vgg16"), FLAT, own)
    assert "take 3 `microbatches` or more" in caught.value.hint
    price(measured("vgg16"), FLAT, own.model_copy(update={"microbatches": 3}))


def test_the_ranks_of_a_plan_are_kept() -> None:
    """Two replicas of each of two stages: server by server, and stage by stage."""
    options, stages = SolveOptions(), tuple(candidates([range(2), range(2, 4)], [2, 2]))
    prices = []
    model = profile(*(layer(name, 1, 2, output_bytes=4, weight_bytes=2) for name in "abcd"))
    for order in in_all_orders(stages):
        cluster = hierarchical_cluster((2, 2), (64.0, 1.0))
        request = Request(model, cluster, options, Clock())
        plan = priced_plan(request, order, accepts_loss=False)
        given = GivenPlan.of(model, plan, Clock())
        assert evaluate(given.problem, given.stages).seconds == pytest.approx(
            plan.predicted.seconds_per_minibatch
        )
        prices.append((plan.stages[0].ranks, plan.predicted.seconds_per_minibatch))
    assert [ranks for ranks, _ in prices] == [(0, 1), (0, 2)]
    assert prices[0][1] != pytest.approx(prices[1][1])
