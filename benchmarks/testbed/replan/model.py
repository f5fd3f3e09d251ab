"""A chain of equally expensive blocks whose messages become smaller in its second half, on random
data.

It writes the time of each update to the file that REPLAN_TIMES names.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

BLOCKS = 12
TOKENS, WIDTH = 128, 128  # of the first half
FEWER = 16  # times; the width is then as much larger as keeps a block's work equal
LATER_WIDTH = 512


class Block(nn.Module):
    """Two linear layers beside an identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.narrow(torch.relu(self.wide(self.norm(x))))
        return x + added


class Merge(nn.Module):
    """Join neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEWER * WIDTH, LATER_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.linear(x.reshape(x.shape[0], TOKENS // FEWER, FEWER * WIDTH))
        return joined


def build_model() -> nn.Module:
    torch.manual_seed(0)
    first = [Block(WIDTH) for _ in range(BLOCKS // 2 + 1)]
    second = [Block(LATER_WIDTH) for _ in range(BLOCKS // 2 - 1)]
    return nn.Sequential(*first, Merge(), *second)


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    inputs = torch.randn(batch_size, TOKENS, WIDTH)
    return (inputs,), torch.randn(batch_size, TOKENS // FEWER, LATER_WIDTH)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def on_update(minibatch: int, loss: float, metrics: object) -> None:
    with Path(os.environ["REPLAN_TIMES"]).open("a", encoding="utf-8") as file:
        file.write(f"{minibatch} {time.time()}\n")
