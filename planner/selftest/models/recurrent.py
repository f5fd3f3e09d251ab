"""GNMT in small: LSTM encoder and decoder with attention, whose result every later layer reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from planner.demo.gnmt import GNMT, loss

__all__ = ["build_tiny", "example_batch", "loss", "optimizer"]

VOCABULARY, LENGTH = 50, 12


def build_tiny() -> nn.Module:
    """Return a model of three layers in the encoder and three in the decoder."""
    return GNMT(3, 16, VOCABULARY)


def example_batch(batch_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return random sentences."""
    source = torch.randint(0, VOCABULARY, (batch_size, LENGTH))
    target = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return (source, target[:, :-1]), target[:, 1:]


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(parameters, lr=1e-3)
