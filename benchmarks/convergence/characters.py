"""A small causal convolutional network that predicts the next character of Python's language
reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

MINIBATCHES, MINIBATCH, EVERY = 2400, 32, 300
LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-3, (0.0, 0.98), 0.01
SETTING = (
    f"{MINIBATCHES} minibatches of {MINIBATCH} windows, AdamW with betas {BETAS}, learning rate "
    f"up to {LEARNING_RATE}, "
    "warm-up over a tenth, then down along a line"
)
LENGTH, WIDTH, TAPS = 48, 64, 5
DILATIONS = (1, 2, 4, 6)  # together they see the whole window
CHARACTERS = 128  # ASCII; all other characters become "?"


class Block(nn.Module):
    """A causal convolution and a linear layer, with a layer norm before them and a residual
    connection.
    """

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.norm, self.merge = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.look_back = nn.Conv1d(WIDTH, 2 * WIDTH, TAPS, dilation=dilation)
        self.reach = (TAPS - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, length, width) to the same shape."""
        before = nn.functional.pad(self.norm(x).transpose(1, 2), (self.reach, 0))
        seen = nn.functional.gelu(self.look_back(before))
        result: Tensor = x + self.merge(seen.transpose(1, 2))
        return result


class Continue(nn.Module):
    """Maps characters to scores of the next characters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.blocks = nn.Sequential(*[Block(dilation) for dilation in DILATIONS])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Map (samples, length) to (samples, length, characters)."""
        scores: Tensor = self.head(self.norm(self.blocks(self.characters(text))))
        return scores


def build_model() -> nn.Module:
    """Return the model of four blocks with random weights."""
    return Continue()


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Return noise."""
    text = torch.randint(0, CHARACTERS, (batch_size, LENGTH + 1))
    return text[:, :-1], text[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy in nats per character."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW without momentum, because delayed gradients act like momentum; weight decay for
    matrices alone.
    """
    both: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for _, parameter in named_parameters:
        both[parameter.ndim > 1].append(parameter)
    groups = [
        {"params": both[0], "weight_decay": 0.0},
        {"params": both[1], "weight_decay": WEIGHT_DECAY},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that warms up over a tenth of the training, then decays linearly to 0."""

    def factor(minibatch: int) -> float:
        return min(minibatch / (0.1 * MINIBATCHES), (MINIBATCHES - minibatch) / (0.9 * MINIBATCHES))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of the text."""

    def __init__(self, text: Tensor) -> None:
        self._text = text

    def __len__(self) -> int:
        return (len(self._text) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index * LENGTH : (index + 1) * LENGTH + 1]
        return window[:-1], window[1:]


def dataset() -> Dataset[tuple[Tensor, Tensor]]:
    """Return all but the last twentieth of the text."""
    return Windows(_text()[: -len(_text()) // 20])


def evaluation_dataset() -> Dataset[tuple[Tensor, Tensor]]:
    """Return the last twentieth of the text."""
    return Windows(_text()[-len(_text()) // 20 :])


@lru_cache(maxsize=1)
def _text() -> Tensor:
    words = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(words.encode("ascii", "replace")), dtype=torch.int64)
