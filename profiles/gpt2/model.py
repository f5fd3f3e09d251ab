"""GPT-2 small (Radford et al. 2019): 12 blocks, 124 million parameters, the embedding tied to the
output.

It trains on the sources of the Python standard library, byte by byte. Bytes need only 256 of the
50,257 tokens, but the weights and the arithmetic of the whole vocabulary are part of the model's
cost.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.demo.data import BYTES, LibraryText

VOCABULARY = 50257
CONTEXT = 1024  # tokens, at most
LENGTH = 128  # tokens of a sample
WIDTH = 768
HEADS = 12
BLOCKS = 12
DROPOUT = 0.1


class Attention(nn.Module):
    """Causal self-attention, (batch, tokens, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        result: Tensor = self.dropout(self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width)))
        return result


class MLP(nn.Module):
    """Two linear layers with a hidden width four times theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        return result


class Block(nn.Module):
    """Attention and MLP, each with a layer norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class GPT2(nn.Module):
    """Tokens (batch, tokens) -> scores of the next token (batch, tokens, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.drop = nn.Dropout(DROPOUT)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * blocks) ** 0.5)
            elif name.endswith("weight") and parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        scores: Tensor = self.lm_head(self.ln_f(x))
        return scores


def build_model() -> nn.Module:
    """Return GPT-2 small with random weights."""
    return GPT2(VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS)


def build_tiny() -> nn.Module:
    """Return two blocks of width 64 over bytes, for experiments."""
    return GPT2(BYTES, LENGTH, 64, 4, 2)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random bytes."""
    tokens = torch.randint(0, BYTES, (batch_size, LENGTH + 1))
    return (tokens[:, :-1],), tokens[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per token."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1)


def dataset() -> LibraryText:
    """Return the sources of the Python standard library."""
    return LibraryText(LENGTH)
