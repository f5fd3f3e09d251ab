"""GPipe's tables: the models have the published sizes, and settings the times of the formula."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.published.gpipe import largest, throughput
from benchmarks.published.gpipe.models.amoebanet import AmoebaNetD, example
from benchmarks.published.gpipe.models.transformer import Transformer
from benchmarks.published.gpipe.profiles import parameters_of, transformer_profile
from benchmarks.published.gpipe.throughput import by_formula, run_setting, setting
from benchmarks.testbed.bed import testbed
from benchmarks.testbed.predict import simulated_s
from planner.cost.layer_costs import LayerCosts
from planner.formats.cluster import flat_cluster
from tests.samples import layer, profile

EQUAL = profile(*(layer(f"l{k}", 0.01, 0.02, 400, 800) for k in range(7)), layer("end", 0.01, 0.02))


def test_amoebanet_has_the_published_sizes() -> None:
    for column in largest.AMOEBANETS[:4]:
        with torch.device("meta"):
            model = AmoebaNetD(*column.size)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        said = float(column.parameters[:-1]) * (1000 if column.parameters.endswith("B") else 1)
        assert millions == pytest.approx(said, rel=0.01), column
    small = AmoebaNetD(3, 16)
    assert small(*example(2)[0]).shape == (2, 1000)


def test_transformers_have_the_published_sizes() -> None:
    with torch.device("meta"):
        three = sum(parameter.numel() for parameter in Transformer(3).parameters())
        four = sum(parameter.numel() for parameter in Transformer(4).parameters())
    for column in largest.TRANSFORMERS:
        said = float(column.parameters[:-1]) * (1e9 if column.parameters.endswith("B") else 1e6)
        assert three + (column.size[0] - 3) * (four - three) == pytest.approx(said, rel=0.005), (
            column
        )


@pytest.mark.parametrize(("partitions", "microbatches"), [(2, 1), (2, 4), (4, 4), (4, 32)])
def test_equal_stages_take_the_time_of_the_formula(partitions: int, microbatches: int) -> None:
    seconds = simulated_s(setting(EQUAL, flat_cluster(partitions, 1e9), partitions, microbatches))
    work_s = 8 * (0.01 + 0.03) * microbatches  # forwards run twice
    assert work_s / seconds == pytest.approx(by_formula(partitions, microbatches), rel=0.01)


def test_the_formula() -> None:
    assert throughput.bubble(4, 1) == 0.75
    assert by_formula(8, 1) == 1
    assert by_formula(2, 32) == pytest.approx(2 * 32 / 33)


def test_the_leanest_cuts_are_those_of_trying_all() -> None:
    layers = [
        layer(f"l{k}", 1, 2, 100 * (k % 3 + 1), 1000 * (7 * k % 5), saved_bytes=500)
        for k in range(7)
    ]
    layer_costs = LayerCosts(profile(*layers, layer("end")))
    for count in (1, 2, 3):
        tried = (
            max(largest.stage(layer_costs, *span).total_bytes for span in pairwise((0, *cuts, 8)))
            for cuts in combinations(range(1, 8), count - 1)
        )
        found = largest.leanest(layer_costs, count)
        assert len(found) == count
        assert max(stage.total_bytes for stage in found) == min(tried)


def test_the_memory_of_transformers_adds_up() -> None:
    """Stages of blocks are the model's; three layers in one stage are counted in two ways."""
    samples = largest.SENTENCES // largest.MICROBATCHES
    whole = transformer_profile(3, samples)
    alone = largest.stage(LayerCosts(whole), 0, len(whole.layers))
    assert alone.weights_bytes == 4 * parameters_of(whole)
    blocks = largest.Blocks(whole, 3)
    assert blocks.middle(1).weights_bytes == 4 * (
        parameters_of(whole) - parameters_of(transformer_profile(2, samples))
    )
    parts = blocks.first(1), blocks.middle(1), blocks.last(1)
    assert sum(part.weights_bytes for part in parts) == alone.weights_bytes
    assert sum(part.optimizer_bytes for part in parts) == alone.optimizer_bytes


@pytest.mark.usefixtures("namespaces")
@pytest.mark.slow
def test_a_setting_runs(tmp_path: Path) -> None:
    """The machine may be busy, so the bound is loose; without sleeping it would be many times
    faster.
    """
    with testbed(2) as bed:
        ran = run_setting(bed, EQUAL, 2, 4, tmp_path, minibatch_s=0.4)
    work_s = 8 * (0.01 + 0.03) * 4
    assert ran.seconds > 0.9 * work_s / by_formula(2, 4)
