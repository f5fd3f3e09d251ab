"""AWD-LSTM language model (Merity et al. 2018) with six LSTM layers, for Penn Treebank.

PipeDream (SOSP 2019) trains an "AWD LM" without giving the sizes of its layers. We assume the
published widths (embedding 400, hidden 1,150, 70 words at a time, 10,000 words) and six layers.
Embedding and output are not tied, because PipeDream cannot share a weight between stages. We leave
out DropConnect on the recurrent weights: it changes weights, not activations, and costs next to
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 70  # words of a sample
VOCABULARY = 10_000
EMBEDDED = 400
WIDTH = 1150
LAYERS = 6


class LockedDropout(nn.Module):
    """Dropout of the same units for all words of a sample (Gal & Ghahramani 2016)."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(torch.ones_like(x[:, :1]), self.share, self.training)


class AWDLanguageModel(nn.Module):
    """Words (batch, 70) -> scores of the next word (batch, 70, 10000).

    Args:
        embedded: width of the embedding, and of the last LSTM layer.
        width: of the other LSTM layers.
        layers: LSTM layers.
    """

    def __init__(self, embedded: int, width: int, layers: int) -> None:
        super().__init__()
        widths = [embedded, *[width] * (layers - 1), embedded]
        self.embedding = nn.Embedding(VOCABULARY, embedded)
        self.input_dropout = LockedDropout(0.4)
        self.lstms = nn.ModuleList(
            nn.LSTM(before, after, batch_first=True) for before, after in pairwise(widths)
        )
        self.dropouts = nn.ModuleList(LockedDropout(0.25) for _ in range(layers))
        self.decoder = nn.Linear(embedded, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        x = self.input_dropout(self.embedding(words))
        for lstm, dropout in zip(self.lstms, self.dropouts, strict=True):
            x = dropout(lstm(x)[0])
        scores: Tensor = self.decoder(x)
        return scores


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return AWDLanguageModel(EMBEDDED, WIDTH, LAYERS)


def build_tiny() -> nn.Module:
    """Return a model of the same layers, 32 wide, for experiments."""
    return AWDLanguageModel(16, 32, LAYERS)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random words."""
    words = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return (words[:, :-1],), words[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per word."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD without momentum, with which AWD-LSTM trains before it averages weights."""
    return torch.optim.SGD(parameters, lr=30.0, weight_decay=1.2e-6)
