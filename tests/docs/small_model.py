"""The model file of the walks through the documentation: small, with a data set."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build_model() -> nn.Module:
    return nn.Sequential(
        *(m for _ in range(8) for m in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10)
    )


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    return (torch.randn(batch_size, 64),), torch.randint(0, 10, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def dataset() -> list[tuple[tuple[Tensor], Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [
        ((torch.randn(64, generator=drawn),), torch.randint(0, 10, (), generator=drawn))
        for _ in range(640)
    ]
