"""A frozen base in 4 bits: what it stores and moves, by the arithmetic of the paper."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Layer, Profile
from planner.plan.trainable import check_base
from planner.profiler.estimated.devices import device_spec
from planner.profiler.estimated.quantized import with_quantized_base
from planner.reporting.tables.plan import options_words
from planner.solver import search_plan
from tests.samples import layer, profile

SPEC = device_spec("rtx-4090", "bfloat16")
MB = 10**6


def frozen(name: str, size_bytes: int, backward_s: float = 2e-3) -> Layer:
    """A layer whose weights get no gradients."""
    known = layer(name, 1e-3, backward_s, output_bytes=100, weight_bytes=size_bytes)
    return known.model_copy(update={"gradient_bytes": 0})


MODEL = profile(
    frozen("embed", 100 * MB, backward_s=0.0),
    frozen("q.base_layer", 64 * MB),
    layer("q.lora_A", 1e-3, 2e-3, output_bytes=100, weight_bytes=MB),
    frozen("head", 100 * MB),
)


def test_only_frozen_layers_beside_adapters_have_few_bits() -> None:
    """32 million weights of 4.127 bits, which are read, and written in half precision, once each
    way.
    """
    quantized = with_quantized_base(MODEL, SPEC)
    assert quantized.base_bits == 4
    for number in (0, 2, 3):
        assert quantized.layers[number] == MODEL.layers[number]

    before, after = MODEL.layers[1], quantized.layers[1]
    assert after.weight_bytes == pytest.approx(32 * MB * 4.127 / 8, rel=1e-3)
    assert after.workspace_bytes == before.workspace_bytes + 64 * MB
    moved_s = (after.weight_bytes + 64 * MB) / (0.85 * SPEC.bandwidth_bytes_per_s)
    assert after.forward_s - before.forward_s == pytest.approx(moved_s + SPEC.launch_s)
    assert after.backward_s - before.backward_s == pytest.approx(moved_s + SPEC.launch_s)


def test_plans_say_so_and_are_not_trained() -> None:
    cluster = flat_cluster(2, 1e9)
    plan = search_plan(with_quantized_base(MODEL, SPEC), cluster, schedule="1f1b-flush")
    assert plan.base_bits == 4
    assert "frozen ones in 4 bits" in (options_words(plan) or "")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    with pytest.raises(PlanError, match="a frozen base in 4 bits, and the executor has it in half"):
        check_base(plan)

    whole = search_plan(MODEL, cluster, schedule="1f1b-flush")
    check_base(whole)
    assert "base_bits" not in whole.model_dump_json()
    assert "base_bits" not in MODEL.model_dump_json()
    assert Profile.model_validate_json(MODEL.model_dump_json()) == MODEL
