"""Attention that recomputes alone: which layers it is, what that costs, and what other trainers are
told of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner.errors import InputError, PlanError
from planner.exports.trainers import configuration_of
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.plan.attention import attention_groups
from planner.plan.blocks import recomputes_parts
from tests.samples import layer, profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
FLAT = flat_cluster(2, 1.25e9)


def measured(name: str) -> Profile:
    return load_profile(PROFILES / name / "cpu.json")


def names_of(known: Profile) -> list[list[str]]:
    groups = attention_groups(known.layers, range(len(known.layers)))
    return [[known.layers[position].name for position in sorted(group)] for group in groups]


def test_a_fused_kernel_is_attention() -> None:
    groups = names_of(measured("gpt2"))
    assert groups[0] == ["h.0.attn.scaled_dot_product_attention"]
    assert len(groups) == 12


def test_written_out_attention_is_its_products_and_what_is_between() -> None:
    """Of six blocks of an encoder, and twice in those of a decoder."""
    groups = names_of(measured("t5"))
    stem = "encoder.block.0.layer.0.SelfAttention"
    assert groups[0] == [f"{stem}.matmul", f"{stem}.softmax", f"{stem}.matmul_2"]
    assert len(groups) == 18


def test_a_router_is_no_attention() -> None:
    model = measured("mixtral")
    assert all("attn" in name for group in names_of(model) for name in group)
    assert attention_groups(measured("resnet50").layers, range(20)) == []


def test_attention_alone_frees_its_activations_for_its_forward() -> None:
    known = measured("t5")
    kept = planner.price(known, FLAT, 2, schedule="1f1b-flush", microbatches=4)
    again = planner.price(
        known, FLAT, 2, schedule="1f1b-flush", microbatches=4, recompute="0:attention"
    )

    stage = again.stages[0]
    groups = attention_groups(known.layers, range(len(stage.layers)))
    assert len(stage.recompute_groups) == len(groups)
    forward_s = sum(known.layers[position].forward_s for group in groups for position in group)
    assert stage.again_s == pytest.approx(forward_s)
    assert stage.memory.activations_bytes < kept.stages[0].memory.activations_bytes
    assert again.stages[1] == kept.stages[1]
    assert again.predicted.seconds_per_minibatch > kept.predicted.seconds_per_minibatch


def test_a_stage_without_attention_is_refused() -> None:
    known = profile(layer("a", 1, 2), layer("b", 1, 2))
    with pytest.raises(InputError, match="stage from 'a' to 'b' has no attention"):
        planner.price(known, FLAT, 1, recompute={0: "attention"})


def test_trainers_recompute_whole_layers() -> None:
    known = measured("gpt2")

    def recomputing(what: str) -> Plan:
        return planner.price(
            known, FLAT, 2, recompute=what, replicas=1, schedule="1f1b-flush", microbatches=4
        )

    plan = recomputing("all:attention")
    assert all(recomputes_parts(stage.layers, stage.recompute_groups) for stage in plan.stages)
    with pytest.raises(PlanError, match="trainers recompute whole layers"):
        configuration_of(plan)
    exported = planner.export(plan, "megatron")
    assert "--recompute-granularity selective" in exported
    assert "recomputes the attention between projections" in " ".join(exported.split())

    blocks = recomputing("all:2")
    assert not any(recomputes_parts(each.layers, each.recompute_groups) for each in blocks.stages)
    assert configuration_of(blocks).recomputed_layers == 2
