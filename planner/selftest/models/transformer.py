"""A causal transformer whose output shares the embedding's weight, and whose second MLP is a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 64  # tokens
VOCABULARY = 256
EXPERTS, CHOSEN = 4, 2


class Attention(nn.Module):
    """Causal self-attention, (batch, tokens, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.inputs(x).split(width, dim=2))
        # Written out, so that the same kernels run whether the model is traced or not.
        positions = torch.arange(tokens, device=x.device)
        hidden = positions[:, None] < positions[None, :]
        scores = (q @ k.transpose(2, 3) / (width // self.heads) ** 0.5).masked_fill(hidden, float("-inf"))
        y: Tensor = self.output((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))
        return y


class Experts(nn.Module):
    """A mixture of experts: each token takes the best two, and all experts run on all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList([_mlp(width) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            y = y + share * expert(x)
        return y


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Attention and MLP, each with a layer norm before it and a skip around it."""

    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2, self.mlp = nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


class Transformer(nn.Module):
    """Tokens (batch, tokens) -> scores of the next token (batch, tokens, vocabulary)."""

    def __init__(self, width: int, heads: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.drop = nn.Dropout(dropout)
        mlps = (Experts(width) if number == 1 else _mlp(width) for number in range(blocks))
        self.blocks = nn.ModuleList([Block(width, heads, mlp) for mlp in mlps])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def build_model() -> nn.Module:
    """Return four blocks of width 192, enough work for measurements of time."""
    return Transformer(192, 4, 4, 0.0)


def build_small() -> nn.Module:
    """Return four blocks of width 32 without dropout, whose training equals that of plain PyTorch."""
    return Transformer(32, 2, 4, 0.0)


def build_tiny() -> nn.Module:
    """Return two blocks of width 32, with dropout."""
    return Transformer(32, 2, 2, 0.1)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random tokens."""
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return (tokens[:, :-1],), tokens[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per token."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
