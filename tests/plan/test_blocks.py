"""Repeated blocks are recognised by names, and only in models that mostly are such blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.formats.profile import Layer, Profile, load_profile
from planner.plan.blocks import block_ends, repeated_blocks, sharded_units
from tests.samples import layer, profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
# seconds and bytes of the output of each layer of a block
KINDS = ((3.0, 8), (1.0, 64), (2.0, 16), (5.0, 8))


def transformer(blocks: int, name: str, tail_s: float = 1.0) -> Profile:
    """An embedding, equal blocks of four layers named by a pattern, and a head."""
    inside: list[Layer] = [
        layer(
            name.format(block=block, part=part),
            seconds,
            2 * seconds,
            output_bytes,
            weight_bytes=100,
        )
        for block in range(blocks)
        for part, (seconds, output_bytes) in enumerate(KINDS)
    ]
    return profile(layer("embed", 1.0, 2.0, 8), *inside, layer("head", tail_s, 2 * tail_s))


def test_blocks_are_the_elements_of_a_list_of_modules() -> None:
    model = transformer(5, "h.{block}.part{part}")
    assert repeated_blocks(model) == [range(1 + 4 * block, 5 + 4 * block) for block in range(5)]
    assert block_ends(model) == {0, 4, 8, 12, 16, 20}  # after the embedding, and after each block


def test_measured_times_vary_but_equal_blocks_stay_equal() -> None:
    model = transformer(5, "h.{block}.part{part}")
    varied = [
        each.model_copy(update={"forward_s": each.forward_s * (1 + 0.05 * (-1) ** number)})
        for number, each in enumerate(model.layers)
    ]
    assert len(repeated_blocks(model.model_copy(update={"layers": tuple(varied)}))) == 5


def test_blocks_of_one_layer_are_no_blocks_of_several() -> None:
    """Four equal layers once were a block, so that stages of 13 and 11 layers were not found."""
    inside = [layer(f"layers.{number}", 1.0, 2.0, 8, weight_bytes=100) for number in range(24)]
    assert (
        block_ends(profile(layer("embed", 1.0, 2.0, 8), *inside, layer("head", 1.0, 2.0)))
        == frozenset()
    )


@pytest.mark.parametrize(
    "model",
    [
        transformer(3, "h.{block}.part{part}"),  # too few
        transformer(5, "h.{block}.part{part}", tail_s=100.0),  # most of the time is elsewhere
        transformer(5, "part{part}_of_{block}"),  # names say nothing
    ],
)
def test_other_models_have_no_blocks(model: Profile) -> None:
    assert repeated_blocks(model) == []
    assert block_ends(model) == frozenset()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bert", 12),
        ("gpt2", 12),
        ("llama", 12),
        ("t5", 12),
        ("vgg16", 0),
        ("resnet50", 0),
        ("inception_v3", 0),
    ],
)
def test_measured_models(name: str, count: int) -> None:
    assert len(repeated_blocks(load_profile(PROFILES / name / "cpu.json"))) == count


def test_experts_are_a_sharded_unit_of_their_own() -> None:
    """With what follows them in their block; not where their block recomputes, nor those that are
    shared by all tokens.
    """
    layers = [
        "embed",
        "h.0.norm",
        "h.0.mlp.shared_experts.up",
        "h.0.mlp.experts",
        "h.0.add",
        "h.1.norm",
        "h.1.mlp.experts.0.up",
        "h.1.mlp.experts.1.up",
        "head",
    ]
    again = tuple(layers[5:])
    first = [tuple(layers[:3]), tuple(layers[3:5])]
    assert sharded_units(layers, ()) == [*first, (layers[5],), tuple(layers[6:])]
    assert sharded_units(layers, [again]) == [*first, again]
