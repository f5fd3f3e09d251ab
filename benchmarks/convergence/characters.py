"""A small Transformer that continues the text of Python's language reference, character by character."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

MINIBATCHES, MINIBATCH, EVERY = 800, 32, 100
LENGTH, WIDTH = 48, 64
CHARACTERS = 128  # others than ASCII become one of them


class Block(nn.Module):
    """Causal attention and two dense layers, each behind a normalisation and beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, length, width) to the same."""
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.attend(self.before(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).flatten(2))
        result: Tensor = x + self.dense(self.between(x))
        return result


class Continue(nn.Module):
    """Characters in, scores of the next ones out."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        """(samples, length) to (samples, length, characters)."""
        scores: Tensor = self.head(self.norm(self.blocks(self.characters(text) + self.positions)))
        return scores


def build_model() -> nn.Module:
    """Four blocks."""
    return Continue()


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Noise."""
    text = torch.randint(0, CHARACTERS, (batch_size, LENGTH + 1))
    return text[:, :-1], text[:, 1:]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy in nats per character."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW, weight decay for matrices alone."""
    both: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for _, parameter in named_parameters:
        both[parameter.ndim > 1].append(parameter)
    groups = [{"params": both[0], "weight_decay": 0.0}, {"params": both[1], "weight_decay": 0.01}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98))


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A warm-up of a tenth, then down along a line."""

    def factor(minibatch: int) -> float:
        return min(minibatch / (0.1 * MINIBATCHES), (MINIBATCHES - minibatch) / (0.9 * MINIBATCHES))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text, one behind the other."""

    def __init__(self, text: Tensor) -> None:
        self._text = text

    def __len__(self) -> int:
        return (len(self._text) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index * LENGTH : (index + 1) * LENGTH + 1]
        return window[:-1], window[1:]


def dataset() -> Dataset[tuple[Tensor, Tensor]]:
    """All but the last twentieth of the text."""
    return Windows(_text()[: -len(_text()) // 20])


def evaluation_dataset() -> Dataset[tuple[Tensor, Tensor]]:
    """The last twentieth."""
    return Windows(_text()[-len(_text()) // 20 :])


@lru_cache(maxsize=1)
def _text() -> Tensor:
    words = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(words.encode("ascii", "replace")), dtype=torch.int64)
