"""A tiny model with dropout and momentum, on data that takes a little time, so that most kills hit
the training.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SECONDS_PER_SAMPLE = 0.002


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks, because workers start faster when they need not trace the model."""
    return list(model.children())


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    return (torch.randn(batch_size, 8),), torch.randint(0, 4, (batch_size,))


class Slow(Dataset[Any]):
    """Random points of four classes, each loaded with a delay."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> Any:
        time.sleep(SECONDS_PER_SAMPLE)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return (x,), (x[0] > 0).long() + 2 * (x[1] > 0).long()


def dataset() -> Dataset[Any]:
    return Slow()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
