"""A small VGG: convolutions do most of the work, fully connected layers have most of the weights.

So an all-reduce of the weights is expensive, while the activations after the convolutions are cheap
to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.testbed.two_cores.marks import Marker

_MARKER = Marker()
CHANNELS, SIZE, CLASSES = (64, 128, 256, 256), 32, 10
HIDDEN = 2048


def build_model() -> nn.Module:
    """Return four convolutions with pooling, then three fully connected layers, in one sequence."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in zip((3, *CHANNELS), CHANNELS, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    features = CHANNELS[-1] * (SIZE // 2 ** len(CHANNELS)) ** 2
    layers += [
        nn.Flatten(),
        nn.Linear(features, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return random images and classes."""
    return (torch.randn(batch_size, 3, SIZE, SIZE),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


def on_update(minibatch: int, loss: float, metrics: Mapping[str, float | None]) -> None:
    """Mark an update, which `plan train` reports."""
    _MARKER.mark(minibatch)
