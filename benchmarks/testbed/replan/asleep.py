"""Emulated devices: layers that sleep for their time, on worker 1 for longer while a file is there.

It writes the time of each update to the file that REPLAN_TIMES names; REPLAN_SLOW names the other.
REPLAN_LAYERS, REPLAN_FORWARD_S and REPLAN_SLOWER change how many layers there are, and their time.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = int(os.environ.get("REPLAN_LAYERS", "8"))
WIDTH = 1024  # so many weights that replicas would wait for each other
FORWARD_S = float(os.environ.get("REPLAN_FORWARD_S", "0.005"))
SLOWER = float(os.environ.get("REPLAN_SLOWER", "2.5"))  # times


def nap(seconds: float) -> None:
    """Sleep as long as a layer takes."""
    slow = os.environ.get("RANK") == "1" and Path(os.environ.get("REPLAN_SLOW", "-")).exists()
    time.sleep(SLOWER * seconds if slow else seconds)


class Nap(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        nap(FORWARD_S)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        nap(2 * FORWARD_S)
        return gradient


class Layer(nn.Module):
    """A small product and a nap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = Nap.apply(torch.tanh(self.linear(x)))  # type: ignore[no-untyped-call]
        return after


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def blocks(model: nn.Sequential) -> list[nn.Module]:
    return list(model)


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    return (torch.randn(batch_size, WIDTH),), torch.randn(batch_size, WIDTH)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def on_update(minibatch: int, loss: float, metrics: object) -> None:
    with Path(os.environ["REPLAN_TIMES"]).open("a", encoding="utf-8") as file:
        file.write(f"{minibatch} {time.monotonic()}\n")
