"""Only layers that draw random numbers are seeded: for the others it would cost time, and cut
compiled code in two.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.operations import is_random
from planner.model.generators import state_of_generators
from planner.model.randomness import generators_kept, keep_state
from planner.model.stage.stage import build_stage


class Net(nn.Module):
    """Everything that may draw random numbers, by how much."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.first, self.drop = nn.Linear(4, 8), nn.Dropout(share, inplace=True)
        self.lstm = nn.LSTM(8, 8, 2, dropout=share)
        self.gru = nn.GRU(8, 8, 2, dropout=share)
        self.features, self.last = nn.Dropout1d(share), nn.Linear(8, 4)
        self.alpha = nn.AlphaDropout(share)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        x = self.gru(self.lstm(x)[0])[0]
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=self.share if self.training else 0.0)
        scores: Tensor = self.last(self.alpha(self.features(x)))
        return scores


@pytest.mark.parametrize(
    ("share", "training", "expected"), [(0.25, True, 6), (0.0, True, 0), (0.25, False, 0)]
)
def test_what_draws_random_numbers(share: float, training: bool, expected: int) -> None:
    batch = Batch((torch.randn(2, 3, 4),), {}, torch.randn(2, 3, 4))
    graph = capture(Net(share).train(training), batch, F.mse_loss)
    found = [
        node for layer in graph.layers for node in layer.nodes if is_random(node, graph.module)
    ]
    assert len(found) == expected, found
    stage = build_stage(graph, [layer.name for layer in graph.layers])
    stage.set_random_key(1, 2, 3)
    before = torch.get_rng_state()
    stage(batch, {})
    assert torch.equal(torch.get_rng_state(), before) == (expected == 0)


class Replacing(nn.Module):
    """Puts a longer buffer in place of its own, as a cache of positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.ones(4)
        return x


def draw() -> None:
    torch.rand(())
    np.random.rand()
    random.random()


def test_state_is_kept_whole() -> None:
    """Buffers, replaced or not, and the generators that user code draws from."""
    module = Replacing()
    cache, states = module.cache, state_of_generators()
    with keep_state(module) as device:
        assert device == torch.device("cpu")
        module(torch.zeros(1))
        cache.add_(1)
        draw()
    assert module.cache is cache
    assert torch.equal(cache, torch.zeros(2))
    assert state_of_generators() == states


@pytest.mark.parametrize("on_success", [True, False])
def test_generators_are_kept_at_least_after_an_error(*, on_success: bool) -> None:
    states = state_of_generators()

    def fail() -> None:
        with generators_kept(on_success=on_success):
            draw()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert state_of_generators() == states
    with generators_kept(on_success=on_success):
        draw()
    assert (state_of_generators() == states) == on_success
