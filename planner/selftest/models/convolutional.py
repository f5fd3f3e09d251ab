"""Residual blocks of convolution, BatchNorm and in-place ReLU on small random images."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

SIZE, CLASSES = 12, 10
BLOCKS, TINY_BLOCKS = 12, 3  # the larger number leaves each of many workers a few layers


class Block(nn.Module):
    """A convolution with a skip around it; no bias, because BatchNorm removes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.relu(self.norm(self.conv(x)))
        return result


class Net(nn.Module):
    """Images (batch, 3, size, size) -> class scores (batch, classes)."""

    def __init__(self, blocks: int, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(channels * (SIZE // 4) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = F.avg_pool2d(self.blocks(self.stem(images)), 4) / len(self.blocks)
        scores: Tensor = self.head(self.drop(features.flatten(1)))
        return scores


def build_model() -> nn.Module:
    """Return the model without dropout, whose training equals that of plain PyTorch."""
    model = Net(BLOCKS)
    model.drop.p = 0.0
    return model


def build_dropout() -> nn.Module:
    """Return the same model with dropout."""
    return Net(BLOCKS)


def build_wide() -> nn.Module:
    """Return wider blocks, enough work for measurements of time and memory."""
    model = Net(8, channels=64)
    model.drop.p = 0.0
    return model


def build_tiny() -> nn.Module:
    """Return a model of fewer blocks, with dropout."""
    return Net(TINY_BLOCKS)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images and classes."""
    return (torch.randn(batch_size, 3, SIZE, SIZE),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def _samples(count: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (count,), generator=generator))


def dataset() -> Dataset[tuple[Tensor, ...]]:
    """Return 4,096 random images: no run comes to a last minibatch, whose microbatches might differ in size."""
    return _samples(4096, 1)


def evaluation_dataset() -> Dataset[tuple[Tensor, ...]]:
    """Return 30 others."""
    return _samples(30, 2)
