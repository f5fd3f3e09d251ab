"""Eight Transformer blocks with many activations for their weights, trained with AdamW.

The input is embedded already and the head is small, so half of the blocks is half of the work.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.transformer_block import Block

BLOCKS, WIDTH, HEADS, LENGTH, CLASSES = 8, 192, 6, 64, 10


class Net(nn.Module):
    """The blocks, and a classifier of the mean over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to [batch, classes]."""
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x.mean(1))
        return y


def build_model() -> nn.Module:
    """Return the model."""
    return Net()


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return random embedded sequences and classes."""
    return (torch.randn(batch_size, LENGTH, WIDTH),), torch.randint(0, CLASSES, (batch_size,))


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """One sample many times: batches take no memory before they are made."""

    def __init__(self) -> None:
        self._input, self._class = torch.randn(LENGTH, WIDTH), torch.tensor(3)

    def __len__(self) -> int:
        return 2**14

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._input, self._class


def dataset() -> Samples:
    """Return the samples."""
    return Samples()


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4)
