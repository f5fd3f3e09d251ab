"""Capture a small model where this is imported: what PyTorch imports and makes for its first
capture takes longer than the capture, and processes that are forked later have it already.

Nothing runs backward here, because autograd's threads would not be there after a fork.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.randomness import generators_kept
from planner.model.stage.stage import build_stage

TOKENS, WIDTH = 5, 8


class Model(nn.Module):
    """What most models of the tests have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.convolution = nn.Conv1d(TOKENS, TOKENS, 3)
        self.batch_norm = nn.BatchNorm1d(TOKENS)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH - 2, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = torch.relu(self.batch_norm(self.convolution(x)))
        return self.head(x).flatten(0, 1)  # type: ignore[no-any-return]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.flatten())


with generators_kept():
    tokens = torch.randint(0, WIDTH, (3, TOKENS))
    graph = capture(Model(), Batch((tokens,), target=tokens), loss)
    build_stage(graph, [layer.name for layer in graph.layers])
