"""A small Transformer that predicts the next character of Python's language reference; 4 blocks, or
8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.convergence.characters import CHARACTERS, LENGTH, WIDTH
from benchmarks.convergence.characters import dataset as dataset
from benchmarks.convergence.characters import evaluation_dataset as evaluation_dataset
from benchmarks.convergence.characters import example_batch as example_batch
from benchmarks.convergence.characters import loss as loss
from benchmarks.convergence.recipes import optimizer as optimizer
from benchmarks.convergence.recipes import scheduler as scheduler
from benchmarks.transformer_block import Block

MINIBATCH = 32
HEADS = 4


class Continue(nn.Module):
    """Maps characters to scores of the next characters."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.characters, self.positions = (
            nn.Embedding(CHARACTERS, WIDTH),
            nn.Parameter(torch.zeros(LENGTH, WIDTH)),
        )
        self.blocks = nn.Sequential(*[Block(WIDTH, HEADS, causal=True) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Map (samples, length) to (samples, length, characters)."""
        scores: Tensor = self.head(self.norm(self.blocks(self.characters(text) + self.positions)))
        return scores


def build_model() -> nn.Module:
    """Return the model of 4 blocks."""
    return Continue(4)


def build_deep() -> nn.Module:
    """Return the model of 8 blocks."""
    return Continue(8)


def stage_of(name: str, stages: int) -> int:
    """Return the stage of a parameter: a block each; tables go with the first, norm and head with
    the last.
    """
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return 0 if name.startswith(("characters", "positions")) else stages - 1
