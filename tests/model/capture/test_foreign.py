"""Weights that a model or a loss uses, and that are not the model's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import planner
from planner.errors import CaptureError
from planner.model.capture.capture import capture_file

WIDTH = 4


def features(n: int) -> Any:
    return (torch.randn(n, WIDTH),), torch.randn(n, WIDTH)


class Weighed(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * torch.exp(-self.log) + self.log


class Projecting(nn.Module):
    """A model that calls a module which is none of its own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other: Callable[[Tensor], Tensor] = lambda x: other(x)  # no module of this one

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.inner(x))


class Holding(nn.Module):
    """A model with the loss's weight, which it returns with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.criterion = Weighed()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.criterion.log


def captured(model: nn.Module, loss: Any, **more: Any) -> Any:
    spec = planner.in_memory(model, example_batch=features, loss=loss, **more)
    return capture_file(spec, spec.example_batch(4))


def test_a_weight_of_the_loss_is_refused_with_its_line() -> None:
    with pytest.raises(
        CaptureError,
        match=r"a weight of shape \(\) is used at .*test_foreign.py:\d+, and is none of",
    ):
        captured(nn.Linear(WIDTH, WIDTH), Weighed())


def test_a_weight_of_another_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="no stage would train it"):
        captured(Projecting(nn.Linear(WIDTH, WIDTH)), mse_loss)


def test_blocks_refuse_weights_of_the_loss_too() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    with pytest.raises(CaptureError, match="no stage would train it"):
        captured(model, Weighed(), blocks=list)


def test_frozen_weights_and_those_under_no_grad_are_constants() -> None:
    teacher = nn.Linear(WIDTH, WIDTH)

    def distilled(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(target)
        return mse_loss(output, wanted)

    frozen = Projecting(nn.Linear(WIDTH, WIDTH).requires_grad_(False))

    assert len(captured(frozen, mse_loss).layers) >= 2
    assert captured(nn.Linear(WIDTH, WIDTH), distilled).loss is not None


class Penalised(nn.Linear):
    """A model that asks for the gradient of its input, which it makes a leaf."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        result: Tensor = super().forward(x)
        (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        return result + slope


def test_leaves_made_in_forward_are_the_models() -> None:
    assert captured(
        nn.Sequential(Penalised(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), mse_loss, blocks=list
    ).layers


def test_the_way_out_trains_the_weight_of_the_loss() -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        result, log = output
        return mse_loss(result, target) * torch.exp(-log) + log

    graph = captured(Holding(), loss)

    assert any("criterion.log" in layer.parameters for layer in graph.layers)
