"""U-Net (Ronneberger et al. 2015): four levels down and up, 31 million parameters, on 128x128
images.

As usual today, convolutions are padded, so that the scores are as large as the image, and BatchNorm
follows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = 128  # pixels
CLASSES = 2
WIDTHS = (64, 128, 256, 512)
BOTTOM = 1024


class Double(nn.Sequential):
    """Convolution, BatchNorm and ReLU, twice."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Images (batch, 3, height, width) -> scores of each pixel (batch, classes, height, width)."""

    def __init__(self, widths: tuple[int, ...], bottom: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [Double(*pair) for pair in zip((3, *widths), widths, strict=False)]
        )
        self.bottom = Double(widths[-1], bottom)
        above = (bottom, *reversed(widths))
        self.up = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairwise(above)])
        self.merge = nn.ModuleList([Double(2 * width, width) for width in reversed(widths)])
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        scores: Tensor = self.head(x)
        return scores


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return UNet(WIDTHS, BOTTOM)


def build_tiny() -> nn.Module:
    """Return a model of two levels, for experiments."""
    return UNet((8, 16), 32)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images and a class for each pixel."""
    return (torch.randn(batch_size, 3, SIZE, SIZE),), torch.randint(
        0, CLASSES, (batch_size, SIZE, SIZE)
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per pixel."""
    return F.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with the paper's high momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.99)
