"""Classify noisy points by which of ten circles they lie on, with eight equal blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

SAMPLES, CLASSES, WIDTH, BLOCKS = 2048, 10, 64, 8


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return result


def build_model() -> nn.Module:
    """Return the model, which maps points (batch, 2) to scores (batch, classes)."""
    return nn.Sequential(
        nn.Linear(2, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES)
    )


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random points and classes."""
    return (torch.randn(batch_size, 2),), torch.randint(0, CLASSES, (batch_size,))


class Circles(Dataset[tuple[tuple[Tensor], Tensor]]):
    """Points on circles; the circle is the class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        circle = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        angle = torch.rand(SAMPLES, generator=generator) * 2 * torch.pi
        radius = circle + 0.2 * torch.randn(SAMPLES, generator=generator)
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        self._samples = TensorDataset(points, circle)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[tuple[Tensor], Tensor]:
        point, circle = self._samples[index]
        return (point,), circle


def dataset() -> Circles:
    """Return 2,048 points."""
    return Circles()


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of DeepSpeed's pipeline example."""
    return torch.optim.Adam(parameters, lr=1e-3)
