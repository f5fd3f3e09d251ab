"""S2VT (Venugopalan et al. 2015): videos to sentences with two LSTM layers of 1,000 over 80 steps.

The first layer reads the frames. The second reads the first one's output and the words so far.
Frames come first, then words, 80 steps in all. Each of the last 20 steps scores a word (we assume
20, since descriptions have 7 words on average). The vocabulary has 46,168 words as in the authors'
released model; we assume that PipeDream's has as many.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 80
WORDS = 20  # steps that score
FEATURES = 4096  # of a frame: the second fully connected layer of VGG-16
EMBEDDED = 500
WIDTH = 1000
VOCABULARY = 46_168


class S2VT(nn.Module):
    """Frames (batch, 80, 4096) and words so far (batch, 80) -> scores of the next word (batch, 20,
    vocabulary).

    Args:
        width: of the LSTM layers.
        embedded: width of the embeddings of frames and words.
        vocabulary: words.
    """

    def __init__(self, width: int, embedded: int, vocabulary: int) -> None:
        super().__init__()
        self.frames = nn.Linear(FEATURES, embedded)
        self.lstm1 = nn.LSTM(embedded, width, batch_first=True)
        self.words = nn.Embedding(vocabulary, embedded)
        self.lstm2 = nn.LSTM(width + embedded, width, batch_first=True)
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, frames: Tensor, words: Tensor) -> Tensor:
        seen = self.lstm1(self.frames(frames))[0]
        said = self.lstm2(torch.cat([seen, self.words(words)], 2))[0]
        scores: Tensor = self.scores(said[:, -WORDS:])
        return scores


def build_model() -> nn.Module:
    """Return the model with random weights."""
    return S2VT(WIDTH, EMBEDDED, VOCABULARY)


def build_tiny() -> nn.Module:
    """Return a model of the same layers, 32 wide, for experiments."""
    return S2VT(32, 16, VOCABULARY)


def example_batch(batch_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return random frames and sentences."""
    words = torch.randint(0, VOCABULARY, (batch_size, STEPS + 1))
    return (torch.randn(batch_size, STEPS, FEATURES), words[:, :-1]), words[:, -WORDS:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy per step."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD without momentum."""
    return torch.optim.SGD(parameters, lr=0.01)
