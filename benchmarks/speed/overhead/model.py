"""A model of trivial operations, so that nearly all the time of a step is overhead.

Each of its six blocks has two weights and draws random numbers; activations are of half a kilobyte.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS, WIDTH = 6, 16


def build_model() -> nn.Module:
    """Return the blocks in one sequence."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(BLOCKS))
    )


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return random vectors and classes."""
    return (torch.randn(batch_size, WIDTH),), torch.randint(0, WIDTH, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=0.001)
