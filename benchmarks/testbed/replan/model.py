"""A chain of equally expensive blocks whose messages become smaller in its last quarter, on random
data.

It writes the time of each update to the file that REPLAN_TIMES names.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

WIDE, NARROW = 9, 3  # blocks before and after tokens are merged
TOKENS, WIDTH = 128, 128
FEWER = 4  # times as few tokens in the last quarter, whose layers are as much wider inside
INNER = 512  # width inside of a block before that


class Block(nn.Module):
    """Two linear layers beside an identity."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, inner)
        self.narrow = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.narrow(torch.relu(self.wide(self.norm(x))))
        return x + added


class Merge(nn.Module):
    """Join neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEWER * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.linear(x.reshape(x.shape[0], TOKENS // FEWER, FEWER * WIDTH))
        return joined


def build_model() -> nn.Module:
    torch.manual_seed(0)
    first = [Block(INNER) for _ in range(WIDE)]
    second = [Block(FEWER * INNER) for _ in range(NARROW)]
    return nn.Sequential(*first, Merge(), *second)


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    inputs = torch.randn(batch_size, TOKENS, WIDTH)
    return (inputs,), torch.randn(batch_size, TOKENS // FEWER, WIDTH)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def on_update(minibatch: int, loss: float, metrics: object) -> None:
    with Path(os.environ["REPLAN_TIMES"]).open("a", encoding="utf-8") as file:
        file.write(f"{minibatch} {time.monotonic()}\n")
