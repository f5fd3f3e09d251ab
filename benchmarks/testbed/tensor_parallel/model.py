"""A Transformer whose attention and feed-forward network ranks can divide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, BLOCKS, WIDTH, HEADS = 1000, 128, 4, 512, 8


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
        x = x + self.attend(self.attention_norm(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result

    def attend(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to what is attended to, of the same shape."""
        q, k, v = (
            each(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.projection(attended.transpose(1, 2).flatten(2))
        return projected


def wide() -> nn.Module:
    """Return the model with vectors of 512 numbers."""
    blocks = (Block(WIDTH) for _ in range(BLOCKS))
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
    )


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random words, and the words after them."""
    words = torch.randint(0, WORDS, (batch_size, LENGTH))
    return (words,), words.roll(-1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all words."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
