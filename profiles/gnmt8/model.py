"""GNMT (Wu et al. 2016): LSTM encoder and decoder with attention, as PipeDream and MLPerf train it.

The encoder's first layer is bidirectional. The decoder's first layer attends to the encoder
(Bahdanau et al. 2015, normalised), and every later layer gets the attention's result besides its
own input. Residual connections start at the third layer of each. In training the whole target
sentence is known, so attention is computed for all words at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 32_320  # about 32,000 subwords, padded to a multiple of 64
LENGTH = 50  # words of a sentence, source and target
DROPOUT = 0.2


class Recurrent(nn.Module):
    """Dropout and one LSTM layer: (batch, words, before) -> (batch, words, width)."""

    def __init__(self, before: int, width: int, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPOUT)
        self.lstm = nn.LSTM(before, width, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(self.dropout(x))[0]
        return y


class Attention(nn.Module):
    """Normalised additive attention: queries (batch, targets, width), keys (batch, sources, width)
    -> like queries.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_q = nn.Linear(width, width, bias=False)
        self.linear_k = nn.Linear(width, width, bias=False)
        self.linear_att = nn.Parameter(torch.rand(width) * 0.2 - 0.1)
        self.normalize_scalar = nn.Parameter(torch.full((1,), width**-0.5))
        self.normalize_bias = nn.Parameter(torch.zeros(width))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        sums = (
            self.linear_q(queries).unsqueeze(2)
            + self.linear_k(keys).unsqueeze(1)
            + self.normalize_bias
        )
        weights = self.linear_att / self.linear_att.norm() * self.normalize_scalar
        scores = (torch.tanh(sums) @ weights).softmax(-1)
        found: Tensor = scores @ keys
        return found


class GNMT(nn.Module):
    """Source and target words (batch, 50) each -> scores of the next target word (batch, 50,
    vocabulary).

    Args:
        layers: LSTM layers in the encoder, and as many in the decoder.
    """

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            [Recurrent(width, width, bidirectional=True), Recurrent(2 * width, width)]
        )
        self.encoder.extend(Recurrent(width, width) for _ in range(layers - 2))
        self.target_embedding = nn.Embedding(vocabulary, width)
        self.first = Recurrent(width, width)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(Recurrent(2 * width, width) for _ in range(layers - 1))
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.source_embedding(source)
        for index, layer in enumerate(self.encoder):
            x = layer(x) + x if index >= 2 else layer(x)
        y = self.first(self.target_embedding(target))
        found = self.attention(y, x)
        for index, layer in enumerate(self.decoder):
            joined = torch.cat([y, found], 2)
            y = layer(joined) + y if index >= 1 else layer(joined)
        scores: Tensor = self.classifier(y)
        return scores


def example_batch(batch_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return random sentences."""
    source = torch.randint(0, VOCABULARY, (batch_size, LENGTH))
    target = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return (source, target[:, :-1]), target[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per word."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(parameters, lr=1e-3)


def build_model() -> nn.Module:
    """Return a model of four layers in the encoder and four in the decoder, with random weights."""
    return GNMT(4, 1024, VOCABULARY)


def build_tiny() -> nn.Module:
    """Return a model of the same layers, 32 wide, for experiments."""
    return GNMT(4, 32, VOCABULARY)
