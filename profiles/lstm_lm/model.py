"""LSTM language model (Zaremba et al. 2014, the medium one): embedding, two LSTM layers of 650, decoder.

Trained on the sources of the Python standard library, byte by byte.
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
        # One module per layer, so that there is a cut between them.
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
    """The model, freshly initialised."""
    return LSTMLanguageModel(WIDTH)


def build_tiny() -> nn.Module:
    """The same layers, 32 wide, to try things out."""
    return LSTMLanguageModel(32)


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Random bytes."""
    tokens = torch.randint(0, BYTES, (batch_size, LENGTH + 1))
    return (tokens[:, :-1],), tokens[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy per byte."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters, lr=2e-3)


def dataset() -> LibraryText:
    """Sources of the Python standard library."""
    return LibraryText(LENGTH)
