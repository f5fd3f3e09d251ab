"""Data made up from the number of the sample, so that every process sees the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # what the models of transformers do not count
PADDING = 0


class Samples(Dataset[Any]):
    """`count` samples that a function makes from a generator."""

    def __init__(self, sample: Callable[[torch.Generator], Any], count: int) -> None:
        self._sample, self._count = sample, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._sample(torch.Generator().manual_seed(index))


def padded_text(
    generator: torch.Generator, vocabulary: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their mask and their labels; the text is a quarter to all of `length` tokens
    long.
    """
    tokens = torch.randint(1, vocabulary, (length,), generator=generator)
    used = int(torch.randint(length // 4, length + 1, (), generator=generator))
    mask = torch.arange(length) < used
    return tokens.where(mask, PADDING), mask.long(), tokens.where(mask, IGNORED)
