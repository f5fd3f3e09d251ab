"""A Transformer of three widths, whose attention and feed-forward network ranks can divide, and one
with experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, BLOCKS, HEADS = 1000, 128, 4, 8
EXPERTS, VISITED = 8, 2  # of a block, and by each token


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


class Experts(nn.Module):
    """A feed-forward network of experts, of which each token visits some.

    Whatever the router has learned, they are those whose turn it is (as in Roller et al., "Hash
    Layers", 2021): so each expert gets as many tokens as any other, which prices assume.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.raised = nn.Parameter(torch.randn(EXPERTS, width, 4 * width) / width**0.5)
        self.lowered = nn.Parameter(torch.randn(EXPERTS, 4 * width, width) / (4 * width) ** 0.5)
        turns = (torch.arange(VISITED * LENGTH) % EXPERTS).view(LENGTH, VISITED)
        self.register_buffer("turn", 100 * F.one_hot(turns, EXPERTS).sum(1).float())

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to the same shape."""
        tokens = x.flatten(0, 1)
        weights, chosen = (self.router(x) + self.turn).flatten(0, 1).softmax(-1).topk(VISITED)
        order = chosen.flatten().argsort(stable=True)
        ends = (
            (chosen.flatten() == torch.arange(EXPERTS, device=x.device)[:, None])
            .sum(1)
            .cumsum(0)
            .int()
        )
        made = F.grouped_mm(tokens[order // VISITED].bfloat16(), self.raised.bfloat16(), offs=ends)
        made = F.grouped_mm(F.gelu(made), self.lowered.bfloat16(), offs=ends).float()
        weighed = made * weights.flatten()[order][:, None]
        result: Tensor = (
            weighed[order.argsort()].view(-1, VISITED, x.shape[-1]).sum(1).view(x.shape)
        )
        return result


class ExpertsBlock(Block):
    """The same with experts in the place of the feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.up, self.down
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to the same shape."""
        x = x + self.attend(self.attention_norm(x))
        result: Tensor = x + self.experts(self.norm(x))
        return result


def _model(width: int, block: Callable[[int], nn.Module] = Block) -> nn.Module:
    blocks = (block(width) for _ in range(BLOCKS))
    return nn.Sequential(
        nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS)
    )


def narrow() -> nn.Module:
    """Return the model with vectors of 256 numbers."""
    return _model(256)


def middle() -> nn.Module:
    """Return the model with vectors of 384 numbers."""
    return _model(384)


def wide() -> nn.Module:
    """Return the model with vectors of 512 numbers."""
    return _model(512)


def experts() -> nn.Module:
    """Return a model with experts and vectors of 256 numbers."""
    return _model(256, ExpertsBlock)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random words, and the words after them."""
    words = torch.randint(0, WORDS, (batch_size, LENGTH))
    return (words,), words.roll(-1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all words."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
