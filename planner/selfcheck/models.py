"""Small models on random images in a file like a user's: convolutions with BatchNorm, and
attention.
"""

import os
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

SIZE = 12
WIDTH = 192
CLASSES = 10
# in the environment: a file for the time at which worker 0 kills itself
KILLED = "PLAN_SELFTEST_KILLED"
KILLED_IN = 6  # this update


class Convolution(nn.Module):
    """A convolution, BatchNorm and an in-place ReLU with a skip around them, (batch, channels,
    size, size).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image of the same shape."""
        result: Tensor = x + self.relu(self.norm(self.conv(x))) / 3
        return result


def build_convolutional(blocks: int = 12, channels: int = 8) -> nn.Module:
    """Return residual blocks of convolutions, enough to leave each of many workers a few layers."""
    head = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(channels * (SIZE // 4) ** 2, CLASSES)]
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), *(Convolution(channels) for _ in range(blocks)), *head
    )


def build_transformer() -> nn.Module:
    """Return blocks of attention over rows of the image, enough to measure memory by; two share a
    weight.
    """
    encoder = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True, norm_first=True)
    layers = [encoder(WIDTH, 4, 4 * WIDTH) for _ in range(4)]
    layers[-1].linear1 = layers[0].linear1
    head = [nn.LayerNorm(WIDTH), nn.Flatten(), nn.Linear(3 * SIZE * WIDTH, CLASSES)]
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(SIZE, WIDTH), *layers, *head)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random images, (batch, 3, size, size), and their classes."""
    return (torch.randn(batch_size, 3, SIZE, SIZE),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(output, target)


class Killable(torch.optim.SGD):
    """SGD that ends worker 0 in an update, if the environment says so."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        """See base class."""
        self.updates += 1
        if self.updates == KILLED_IN and KILLED in os.environ and os.environ.get("RANK") == "0":
            Path(os.environ[KILLED]).write_text(repr(time.time()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return Killable(parameters, lr=0.005, momentum=0.9)


def dataset() -> Dataset[tuple[Tensor, ...]]:
    """Return the same images each time."""
    # No run comes to a last minibatch, whose microbatches might differ in size.
    images = torch.randn(4096, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return TensorDataset(images, torch.arange(4096) % CLASSES)
