"""Which part of a backward computes gradients of weights, beside what autograd computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from planner.formats.profile import UNKNOWN_WEIGHT_SHARE
from planner.model.spec import in_memory
from planner.profiler.estimated.estimate import EstimateOptions, estimate_profile
from tests.samples import layer

WIDTH, HEADS, TOKENS, BATCH = 512, 4, 1024, 4


class Attention(nn.Module):
    """Attention without weights."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(*x.shape[:-1], HEADS, -1).transpose(1, 2)
        mixed = scaled_dot_product_attention(heads, heads, heads)
        return mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Linear layers around attention, a norm, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.ReLU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.act(self.up(self.norm(self.attention(self.first(x))))))
        return result


def example_batch(size: int) -> tuple[Any, Any]:
    return torch.randn(size, TOKENS, WIDTH), torch.randn(size, TOKENS, WIDTH)


def shares() -> dict[str, float | None]:
    spec = in_memory(Model(), example_batch=example_batch, loss=mse_loss)
    profile = estimate_profile(spec, BATCH, EstimateOptions("a100"))
    return {each.name: each.weight_share for each in profile.layers}


def flops_of(gradients_of: str, model: Model) -> int:
    """Return what autograd multiplies for gradients of the weights, or of what layers get."""
    linear = model.up
    x = torch.randn(8, WIDTH, requires_grad=True)
    y = linear(x)
    wanted = [x] if gradients_of == "inputs" else [linear.weight, linear.bias]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(y, wanted, torch.ones_like(y))
    return int(counter.get_total_flops())


def test_each_kind_of_layer_has_its_share() -> None:
    found = shares()
    model = Model()
    weights, inputs = (flops_of(each, model) for each in ("weights", "inputs"))
    assert found["up"] == pytest.approx(weights / (weights + inputs), abs=0.1)
    assert found["down"] == pytest.approx(found["up"], abs=0.1)
    # its input needs no gradient
    assert found["first"] == pytest.approx(1.0)
    assert found["act"] == 0
    of_attention = [share for name, share in found.items() if name.startswith("attention")]
    assert of_attention
    assert not any(of_attention)


def test_layers_of_profiles_that_do_not_say_it() -> None:
    """Half of the backward where there are weights, and nothing where there are none."""
    plain = layer("a", 1, 2)
    assert plain.backward_weight_s == 0
    weighty = layer("b", 1, 2, weight_bytes=4)
    assert weighty.backward_weight_s == 2 * UNKNOWN_WEIGHT_SHARE
    assert weighty.model_copy(update={"weight_share": 0.25}).backward_weight_s == 0.5
