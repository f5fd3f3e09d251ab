"""The Transformer block of the benchmarks' own models."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Self-attention and a feed-forward network of four times the width, with norms before and
    connections around them.

    Args:
        width: of each position's vector.
        heads: of the attention.
        causal: whether a position sees only those before it.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self._heads, self._causal = heads, causal
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3, self._heads, -1)).transpose(1, 3)
        q, k, v = qkv.unbind(2)  # each (samples, heads, length, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self._causal)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result
