"""Transformer-L: L layers of the published sizes, a vocabulary of 32,000, embedding and output not
tied.

Attention is not fused, as in 2018: the scores of all heads are stored, 32 x 1024 x 1024 per
sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, HEADS = 2048, 8192, 32
LENGTH, VOCABULARY = 1024, 32_000
DROPOUT = 0.1


class Layer(nn.Module):
    """Self-attention and two linear layers, each with a layer norm before it and a residual
    connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.softmax = nn.Softmax(-1)
        self.attention_dropout = nn.Dropout(DROPOUT)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.dropout_1 = nn.Dropout(DROPOUT)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, HIDDEN)
        self.relu = nn.ReLU()
        self.narrow = nn.Linear(HIDDEN, WIDTH)
        self.dropout_2 = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=2)
        )
        shares = self.attention_dropout(
            self.softmax(q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5)
        )
        mixed = (shares @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.dropout_1(self.project(mixed))
        result: Tensor = x + self.dropout_2(self.narrow(self.relu(self.wide(self.norm_2(x)))))
        return result


class Transformer(nn.Module):
    """Tokens (batch, length) -> scores of the next token (batch, length, vocabulary)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.output(self.norm(x))
        return scores


def example(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random tokens and the tokens that follow them."""
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return (tokens[:, :-1],), tokens[:, 1:]
