"""Eight equal Transformer blocks: evenly spread compute, few weights, small activations between
blocks.

The input is already embedded and the head is tiny, so half of the blocks is half of the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.testbed.two_cores.marks import Marker
from benchmarks.transformer_block import Block

_MARKER = Marker()
BLOCKS, WIDTH, HEADS, LENGTH, CLASSES = 8, 128, 4, 64, 10


class Head(nn.Module):
    """Mean over the positions, then a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to [batch, classes]."""
        y: Tensor = self.classifier(x.mean(1))
        return y


def build_model() -> nn.Module:
    """Return the blocks and the head, in one sequence."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(BLOCKS)), Head())


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return random embedded sequences and classes."""
    return (torch.randn(batch_size, LENGTH, WIDTH),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


def on_update(minibatch: int, loss: float, metrics: Mapping[str, float | None]) -> None:
    """Mark an update, which `plan train` reports."""
    _MARKER.mark(minibatch)
