"""A small residual network with BatchNorm on scikit-learn's digits, as a vision model beside the
Transformer.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.convergence.digits import dataset as dataset
from benchmarks.convergence.digits import evaluation_dataset as evaluation_dataset
from benchmarks.convergence.digits import example_batch as example_batch
from benchmarks.convergence.digits import loss as loss
from benchmarks.convergence.digits import metrics as metrics
from benchmarks.convergence.recipes import optimizer as optimizer
from benchmarks.convergence.recipes import scheduler as scheduler

MINIBATCH = 32
CHANNELS = (16, 16, 32, 32, 64)  # after the first convolution, and after each block


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a connection around them; halves the image where
    channels double.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = out // channels
        self.first, self.second = (
            nn.Conv2d(channels, out, 3, stride, 1),
            nn.Conv2d(out, out, 3, 1, 1),
        )
        self.before, self.after = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.around = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, channels, height, width) to (samples, out, height, width), halved where
        channels double.
        """
        inside = self.after(self.second(torch.relu(self.before(self.first(x)))))
        return torch.relu(inside + self.around(x))


class Recognise(nn.Module):
    """Maps images of 8x8 to scores of the ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS[0], 3, 1, 1)
        self.blocks = nn.Sequential(*[Block(*pair) for pair in pairwise(CHANNELS)])
        self.classifier = nn.Linear(CHANNELS[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (samples, 3, 8, 8) to (samples, 10)."""
        scores: Tensor = self.classifier(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


def build_model() -> nn.Module:
    """Return the model of 4 blocks."""
    return Recognise()


def stage_of(name: str, stages: int) -> int:
    """Return the stage of a parameter: a block each; the first convolution is in the first, the
    head in the last.
    """
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return 0 if name.startswith("stem") else stages - 1
