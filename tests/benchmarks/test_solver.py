"""The solver's benchmarks: their models are what they say, and the published programme is the
published one.
"""

from __future__ import annotations

import random

import pytest

from benchmarks.published.cost_models import solve_published
from benchmarks.published.published_optimizer import ChainLayer, best_time_s
from benchmarks.speed.graphs import chain, nasnet_like
from tests.samples import layer, profile


def test_the_graphs_have_the_sizes_of_their_models() -> None:
    assert 1_150 < len(nasnet_like().layers) < 1_350
    assert len(chain(37).layers) == 37
    assert chain(37) == chain(37)


@pytest.mark.parametrize("seed", range(5))
def test_the_published_programme_and_the_search_agree(seed: int) -> None:
    draw = random.Random(seed)
    layers = [
        layer(
            f"l{i}",
            draw.uniform(1, 5),
            draw.uniform(1, 9),
            draw.randint(1, 90),
            draw.randint(0, 99),
        )
        for i in range(12)
    ]
    model = profile(*layers)
    described = [
        ChainLayer(
            each.forward_s + each.backward_s, each.outputs[0].output_bytes, each.gradient_bytes
        )
        for each in model.layers
    ]
    assert solve_published(model, 5, 20.0).seconds == pytest.approx(
        best_time_s(described, 5, 20.0), rel=1e-9
    )
