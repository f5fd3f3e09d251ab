"""A small Transformer that predicts the next character of Python's language reference; 4 blocks, or 8.

`CONVERGENCE_RECIPE` in the environment chooses the recipe, as JSON: {"optimizer": "newest-muon", "rate": 0.002,
"minibatches": 1200}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from benchmarks.convergence.characters import CHARACTERS, LENGTH, WIDTH
from benchmarks.convergence.characters import dataset as dataset
from benchmarks.convergence.characters import evaluation_dataset as evaluation_dataset
from benchmarks.convergence.characters import example_batch as example_batch
from benchmarks.convergence.characters import loss as loss
from benchmarks.convergence.recipes import Recipe, schedule_of

MINIBATCH = 32
HEADS = 4


class Block(nn.Module):
    """Causal attention and two linear layers, each with a layer norm before it and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to the same shape."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attend(self.before(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).flatten(2))
        result: Tensor = x + self.dense(self.between(x))
        return result


class Continue(nn.Module):
    """Maps characters to scores of the next characters."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])
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


def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the recipe's optimizer."""
    return _recipe().build(named_parameters)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that warms up over a tenth of the training, then decays linearly to 0."""
    return schedule_of(optimizer, _recipe().minibatches)


def _recipe() -> Recipe:
    return Recipe(**json.loads(os.environ.get("CONVERGENCE_RECIPE", "{}")))
