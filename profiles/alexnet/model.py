"""AlexNet for ImageNet with one column (Krizhevsky 2014), as PipeDream and torchvision have it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 224  # pixels
CLASSES = 1000


class AlexNet(nn.Module):
    """Images (batch, 3, 224, 224) -> class scores (batch, 1000).

    Args:
        width: of the fully connected layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(width, width),
            nn.ReLU(inplace=True),
            nn.Linear(width, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return AlexNet(4096)


def build_tiny() -> nn.Module:
    """Return a model with narrow fully connected layers, for experiments."""
    return AlexNet(64)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images and classes."""
    return (torch.randn(batch_size, 3, SIZE, SIZE),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)
