"""A Transformer of three widths, whose attention and feed-forward network ranks can divide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, BLOCKS, HEADS = 1000, 128, 4, 8


class Block(nn.Module):
    """Self-attention with a product each for query, key and value, and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to the same shape."""
        h = self.attention_norm(x)
        q, k, v = (each(h).unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def _model(width: int) -> nn.Module:
    blocks = (Block(width) for _ in range(BLOCKS))
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS))


def narrow() -> nn.Module:
    """Return the model with vectors of 256 numbers."""
    return _model(256)


def middle() -> nn.Module:
    """Return the model with vectors of 384 numbers."""
    return _model(384)


def wide() -> nn.Module:
    """Return the model with vectors of 512 numbers."""
    return _model(512)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random words, and the words after them."""
    words = torch.randint(0, WORDS, (batch_size, LENGTH))
    return (words,), words.roll(-1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all words."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
