"""Schedules and groups of parameters that several recipes share, as their papers and scripts have
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

STEPS = 8  # minibatches that are trained


def linear_after_warm_up(warm_up: int = 2) -> Callable[[int], float]:
    """Return the factor of BERT's schedule: up from 0, and down to 0."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        return max(0.0, (STEPS - step) / (STEPS - warm_up))

    return factor


def cosine_after_warm_up(warm_up: int = 2, least: float = 0.1) -> Callable[[int], float]:
    """Return the factor of GPT-3's schedule: up from 0, and down to a tenth by a cosine."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        done = (step - warm_up) / (STEPS - warm_up)
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def trapezoid(warm_up: int = 2, cool_down: int = 3) -> Callable[[int], float]:
    """Return the factor of ModernBERT's schedule: up, stable, and down by a square root."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        left = STEPS - step
        return 1.0 if left > cool_down else 1 - math.sqrt(1 - left / (cool_down + 1))

    return factor


def by_factor(optimizer: Optimizer, factor: Callable[[int], float]) -> LambdaLR:
    """Return the scheduler that multiplies every group's rate by this factor."""
    return LambdaLR(optimizer, factor)


def matrices_decay(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Return two groups: weights that decay, and biases, norms and scales, which do not."""
    pairs = list(named_parameters)
    decayed = [weight for _, weight in pairs if weight.ndim > 1]
    rest = [weight for _, weight in pairs if weight.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
