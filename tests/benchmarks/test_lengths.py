"""Generated sentences, and layers that sleep for as long as they take."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from unittest import mock

import pytest
import torch

from benchmarks.testbed.emulate import Scale
from benchmarks.testbed.layers import DEVICE
from benchmarks.testbed.lengths.emulate import emulate
from benchmarks.testbed.lengths.layers import Block, Run, write_model
from benchmarks.testbed.lengths.sentences import DISTRIBUTIONS, SHORTEST, pairs
from planner.formats.profile import load_profile
from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file
from planner.model.stage.stage import build_stage

PROFILE = Path(__file__).parents[2] / "benchmarks" / "testbed" / "lengths" / "gnmt8-v100.json"
BLOCKS = (
    Block(
        (0.1, 0.4, 0.0, 0.0, 0.0, 0.0), (0.0, 2.0, 0.0, 0.0, 0.0, 0.0), 0.5, 40, (0, 3, 0, 0, 0, 0)
    ),
    Block(
        (0.0, 0.0, 1.0, 0.0, 2.0, 0.0), (0.0, 0.0, 4.0, 0.0, 0.0, 0.0), 0.5, 40, (2, 0, 1, 0, 1, 0)
    ),
)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_sentences_have_the_means_of_their_distribution(name: str) -> None:
    of = DISTRIBUTIONS[name]
    found = pairs(of, 4000)
    assert len(found) == 4000
    assert found == pairs(of, 4000)
    assert all(SHORTEST <= words <= of.longest for pair in found for words in pair)
    # Sentences that are too long are left out, so means are somewhat below those of the
    # distribution.
    for number, expected in enumerate((of.source_mean, of.target_mean)):
        assert 0.8 * expected < mean(pair[number] for pair in found) < 1.05 * expected


@pytest.mark.parametrize("order", ["buckets", "padded"])
def test_layers_sleep_for_the_lengths_of_a_batch_and_carry_its_bytes(
    order: str, tmp_path: Path
) -> None:
    path = write_model(Run(BLOCKS, (4, 4), (50, 20), ((10, 5), (25, 10)), order), tmp_path)
    spec = load_model_file(str(path))
    graph = capture_file(spec, spec.example_batch(2))
    assert [layer.name for layer in graph.layers] == ["layers.0", "layers.1", "loss"]
    batch = spec.collate([(10, 5), (25, 10)])
    source, target = (50, 20) if order == "padded" else (25, 10)
    assert [each.shape for each in batch.args] == [(2, source), (2, target)]
    first = build_stage(graph, ["layers.0"])
    second = build_stage(graph, ["layers.1", "loss"])
    slept: list[float] = []
    with mock.patch.object(DEVICE, "compute", slept.append):
        (made,) = first(batch, {}).values()
        assert made.shape == (2, 3 * source)
        received = made.detach().requires_grad_()
        loss = second(batch, {second.received[0].name: received})["loss"]
        torch.autograd.backward(loss)
    assert received.grad is not None
    x, y = source / 50, target / 20
    assert slept == pytest.approx([0.1 + 0.4 * x, y + 2 * x * y, 4 * y])


def test_the_emulated_profile_is_that_of_the_layers(tmp_path: Path) -> None:
    profile = load_profile(PROFILE)
    emulated = emulate(
        profile, Scale(10.0, 0.01), pairs(DISTRIBUTIONS["wmt"], 640), "buckets", tmp_path
    ).profile
    assert emulated.lengths is not None
    for what in ("forward_s", "backward_s", "update_s"):
        whole = sum(getattr(layer, what) for layer in profile.layers)
        assert sum(getattr(layer, what) for layer in emulated.layers) == pytest.approx(
            10 * whole, rel=0.02
        )
    sizes = sum(layer.gradient_bytes for layer in profile.layers)
    assert sum(layer.gradient_bytes for layer in emulated.layers) == pytest.approx(
        sizes / 100, rel=0.001
    )
    for layer, fits in zip(emulated.layers, emulated.lengths.layers, strict=True):
        assert sum(fits.forward_s.shares) == pytest.approx(1.0) or layer.forward_s == 0
        assert len(fits.outputs) == len(layer.outputs)
