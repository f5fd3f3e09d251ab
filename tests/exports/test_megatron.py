"""Arguments for Megatron-LM."""

from __future__ import annotations

import pytest

import planner
from planner.errors import PlanError
from planner.formats.plan import Plan
from planner.formats.profile import LossMean
from tests.executor.plans import in_groups
from tests.exports.plans import plan_of


def blocks(*numbers: int) -> list[str]:
    return [f"h.{number}.{part}" for number in numbers for part in ("attn.c_proj", "mlp")]


def test_equal_stages_need_no_layout() -> None:
    plan = plan_of([["wte", *blocks(0, 1)], [*blocks(2, 3), "ln_f", "loss"]], (2, 2))
    lines = planner.export(plan, "megatron").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "--num-layers 4",
        "--pipeline-model-parallel-size 2",
        "--micro-batch-size 4",
        "--global-batch-size 32",
    ]


def test_unequal_stages_are_a_layout() -> None:
    plan = plan_of(
        [["wte", *blocks(0)], blocks(1, 2, 3), ["ln_f", "head", "loss"]],
        schedule="1f1b",
        microbatches=1,
    )
    text = planner.export(plan, "megatron")
    assert '--pipeline-model-parallel-layout "Et|ttt|L"' in text
    assert "# The plan's schedule, 1f1b" in text


def test_losses_that_are_weighed_are_said() -> None:
    plan = plan_of([["wte", *blocks(0, 1)], [*blocks(2, 3), "ln_f", "loss"]], (2, 2))
    labels = plan.model_copy(update={"loss": LossMean(over="labels", ignored=-100)})
    assert "# The loss is a mean over the labels that count" in planner.export(labels, "megatron")
    assert "The loss is" not in planner.export(plan, "megatron")


def test_compressed_messages_are_said() -> None:
    plan = plan_of([["wte", *blocks(0, 1)], [*blocks(2, 3), "ln_f", "loss"]], (2, 2))
    coded = plan.model_copy(
        update={"cluster": plan.cluster.model_copy(update={"compress": "int8"})}
    )
    assert "# The plan sends activations as int8. " in planner.export(coded, "megatron")
    assert "sends activations" not in planner.export(plan, "megatron")


def test_sharded_stages_and_layers_that_recompute() -> None:
    plan = plan_of([["wte", *blocks(0, 1)], [*blocks(2, 3), "ln_f", "loss"]], (2, 2))
    first = {"sharded": True, "recompute": (tuple(blocks(0)),), "recompute_s": 2.0}
    changed = (
        plan.stages[0].model_copy(update=first),
        plan.stages[1].model_copy(update={"sharded": True}),
    )
    text = planner.export(plan.model_copy(update={"stages": changed}), "megatron")
    assert "--use-distributed-optimizer" in text
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers 1" in text
    assert "# 1, 0 layers of the stages recompute; Megatron takes one number for all." in text
    every = tuple(stage.model_copy(update={"recompute": True}) for stage in plan.stages)
    text = planner.export(plan.model_copy(update={"stages": every}), "megatron")
    assert "--recompute-method uniform --recompute-num-layers 1" in text
    assert "optimizer" not in text


def test_groups_of_ranks_are_tensor_parallel() -> None:
    plan = in_groups(plan_of([["wte", *blocks(0)], [*blocks(1, 2, 3), "ln_f", "loss"]], (2, 2)), 4)
    text = planner.export(plan, "megatron")
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "--num-layers 4",
        "--pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 4",
        '--pipeline-model-parallel-layout "Et|tttL"',
        "--micro-batch-size 4",
        "--global-batch-size 32",
    ]
    assert "# Layers are sharded over 4 ranks." in text
    by_tokens = plan.model_copy(
        update={"cluster": plan.cluster.model_copy(update={"sequence_parallel": True})}
    )
    assert "\n--sequence-parallel\n" in planner.export(by_tokens, "megatron")
    uneven = (
        plan.stages[0],
        plan.stages[1].model_copy(update={"tensor": 2, "ranks": tuple(range(8, 12))}),
    )
    with pytest.raises(PlanError, match="different numbers of ranks"):
        planner.export(plan.model_copy(update={"stages": uneven}), "megatron")


def test_ranks_that_divide_experts() -> None:
    plan = in_groups(plan_of([["wte", *blocks(0, 1)], [*blocks(2, 3), "ln_f", "loss"]], (2, 2)), 4)
    text = planner.export(plan.model_copy(update={"experts": 8}), "megatron")
    assert [
        line for line in text.splitlines() if "expert" in line and not line.startswith("#")
    ] == [
        "--num-experts 8",
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
    ]
    # without which Megatron refuses layers with experts in such groups
    assert "\n--sequence-parallel\n" in text
    assert "expert" not in planner.export(plan, "megatron")


def test_ranks_that_divide_experts_alone_are_replicas() -> None:
    plan = in_groups(plan_of([["wte", *blocks(0, 1)], [*blocks(2, 3), "ln_f", "loss"]], (2, 2)), 4)
    text = planner.export(plan.model_copy(update={"experts": 8, "by_samples": True}), "megatron")
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "--num-layers 4",
        "--pipeline-model-parallel-size 2",
        "--num-experts 8",
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
        "--micro-batch-size 1",
        "--global-batch-size 32",
    ]
    assert "# Of 8 experts of a layer, each of 4 ranks has a part." in text


def test_what_it_cannot_express() -> None:
    chunks = plan_of([["wte", *blocks(0)], blocks(1), blocks(2), [*blocks(3), "loss"]])
    stages = [
        stage.model_dump() | {"ranks": (rank,)}
        for stage, rank in zip(chunks.stages, (0, 1, 1, 0), strict=True)
    ]
    with pytest.raises(PlanError, match="gives stage s to worker s mod 2, and zb-v does not"):
        planner.export(
            Plan.model_validate(chunks.model_dump() | {"schedule": "zb-v", "stages": stages}),
            "megatron",
        )
    with pytest.raises(
        PlanError, match=r"'h\.2' is in stage 0, and 'h\.1' before it in the model is in stage 1"
    ):
        planner.export(
            plan_of([["wte", "h.0.attn", "h.2.attn"], ["h.1.attn", "h.3.attn", "loss"]]), "megatron"
        )
    with pytest.raises(PlanError, match=r"cut before stage 1 is inside 'h\.1'"):
        planner.export(plan_of([["wte", *blocks(0), "h.1.attn"], ["h.1.mlp", "loss"]]), "megatron")
    with pytest.raises(PlanError, match="layer 'wpe' is in stage 1"):
        planner.export(plan_of([["wte"], ["wpe", *blocks(0, 1)], ["loss"]]), "megatron")
    with pytest.raises(PlanError, match="layer 'ln_f' is in stage 1"):
        planner.export(plan_of([["wte", *blocks(0)], [*blocks(1), "ln_f"], ["loss"]]), "megatron")
    with pytest.raises(PlanError, match="has no numbered list of layers"):
        planner.export(plan_of([["conv"], ["loss"]]), "megatron")
    with pytest.raises(
        PlanError, match="Megatron copies whole pipelines, so it has no form for '2-1'"
    ):
        planner.export(plan_of([["wte", *blocks(0)], blocks(1)], (2, 1)), "megatron")
