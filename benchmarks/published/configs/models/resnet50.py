"""ResNet-50 as published: 224x224 images, 1,000 classes, 26 million weights."""

import torch
from torch import Tensor, nn

from profiles.resnet50.model import ResNet50, loss, optimizer

__all__ = ["build_model", "example_batch", "loss", "optimizer"]


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return ResNet50(1000)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images and classes."""
    return (torch.randn(batch_size, 3, 224, 224),), torch.randint(0, 1000, (batch_size,))
