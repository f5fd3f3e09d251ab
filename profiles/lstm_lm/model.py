"""LSTM language model (Zaremba et al. 2014, medium size): embedding, two LSTM layers of 650,
decoder.

It trains on the sources of the Python standard library, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.demo.data import BYTES, LibraryText

LENGTH = 64  # bytes of a sample
WIDTH = 650
DROPOUT = 0.5


class LSTMLanguageModel(nn.Module):
    """Bytes (batch, length) -> scores of the next byte (batch, length, 256)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.dropout = nn.Dropout(DROPOUT)
        # One module per layer, so that the model can be cut between them.
        self.lstm1 = nn.LSTM(width, width, batch_first=True)
        self.lstm2 = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        x = self.dropout(self.lstm1(x)[0])
        x = self.dropout(self.lstm2(x)[0])
        scores: Tensor = self.decoder(x)
        return scores


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return LSTMLanguageModel(WIDTH)


def build_tiny() -> nn.Module:
    """Return a model of the same layers, 32 wide, for experiments."""
    return LSTMLanguageModel(32)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random bytes."""
    tokens = torch.randint(0, BYTES, (batch_size, LENGTH + 1))
    return (tokens[:, :-1],), tokens[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per byte."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(parameters, lr=2e-3)


def dataset() -> LibraryText:
    """Return the sources of the Python standard library."""
    return LibraryText(LENGTH)
