"""A small convolutional network on scikit-learn's digits; every fifth digit is held out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from planner.demo.data import Digits

MINIBATCHES, MINIBATCH, EVERY = 540, 32, 45  # twelve epochs
SETTING = (
    "540 minibatches of 32 images, SGD without momentum, learning rate 0.1 down to 0 along a cosine"
)


def build_model() -> nn.Module:
    """Return a network of nine modules for images of 8x8."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return noise."""
    return torch.randn(batch_size, 3, 8, 8), torch.randint(0, 10, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD without momentum: with 0.9 and a rate of 0.02, gradients three updates old end at
    chance level.
    """
    return torch.optim.SGD(parameters, lr=0.1)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that decays to 0 along a cosine."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MINIBATCHES)


def dataset() -> Dataset[tuple[Tensor, Tensor]]:
    """Return four fifths of the digits."""
    return _part(held_out=False)


def evaluation_dataset() -> Dataset[tuple[Tensor, Tensor]]:
    """Return the other fifth."""
    return _part(held_out=True)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the accuracy."""
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def _part(*, held_out: bool) -> Dataset[tuple[Tensor, Tensor]]:
    digits = Digits(8)
    return Subset(digits, [index for index in range(len(digits)) if (index % 5 == 0) == held_out])
