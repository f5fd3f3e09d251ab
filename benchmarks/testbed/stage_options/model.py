"""Eight Transformer blocks with many activations for their weights, trained with AdamW; and others
by their sizes.

The input is embedded already and the head is small, so half of the blocks is half of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.testbed.tensor_parallel.model import Block as DividedBlock
from benchmarks.transformer_block import Block

BLOCKS, WIDTH, LENGTH, CLASSES, WORDS = 8, 192, 64, 10, 1000
HEAD = 32  # width of a head of the attention
DIFFERENT = 64  # samples

# of a model file: the model, a batch, the samples, the loss and the optimizer
Parts = tuple[Callable[..., Any], ...]


class Net(nn.Module):
    """The blocks, and a classifier of the mean over the positions."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, width // HEAD) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to [batch, classes]."""
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x.mean(1))
        return y


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Some samples many times: batches take no memory before they are made."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return 2**14

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = index % len(self._inputs)
        return self._inputs[number], self._targets[number]


def sized(blocks: int, width: int, length: int) -> Parts:
    """Return what a model file of embedded sequences of this length has."""

    def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.randn(batch_size, length, width),), torch.randint(0, CLASSES, (batch_size,))

    return _parts(lambda: Net(blocks, width), example_batch, F.cross_entropy)


def words(blocks: int, width: int, length: int) -> Parts:
    """Return what a model file of sequences of words has, whose products ranks can divide."""

    def build_model() -> nn.Module:
        middle = (DividedBlock(width) for _ in range(blocks))
        return nn.Sequential(
            nn.Embedding(WORDS, width), *middle, nn.LayerNorm(width), nn.Linear(width, WORDS)
        )

    def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        found = torch.randint(0, WORDS, (batch_size, length))
        return (found,), found.roll(-1, 1)

    return _parts(
        build_model,
        example_batch,
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    )


def _parts(
    build_model: Callable[[], nn.Module],
    example_batch: Callable[[int], tuple[tuple[Tensor, ...], Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Parts:
    def dataset() -> Samples:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            (inputs,), targets = example_batch(DIFFERENT)
        return Samples(inputs, targets)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4)

    return build_model, example_batch, dataset, loss, optimizer


build_model, example_batch, dataset, loss, optimizer = sized(BLOCKS, WIDTH, LENGTH)
