"""Layers that sleep, longer on devices that are slow at the moment: of `tests.executor.sleeping`.

They count their calls here, because a model file that counts is refused.
"""

from __future__ import annotations

import json
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Device:
    """How far this process has come, and when its device is slow."""

    def __init__(self) -> None:
        self.phases: list[tuple[int, int, int, float]] = []
        self.now: Path | None = None  # as long as there is such a file, it says who is slow
        # An iterator: a number that calls change is refused, because a model may read it.
        self.calls = count()

    def slowness(self) -> float:
        """Return how many times as long the next forward takes, and its backward."""
        rank = int(os.environ["RANK"])
        number = next(self.calls)
        if self.now is not None and self.now.exists():
            slow, factor = json.loads(self.now.read_text("utf-8"))
            return float(factor) if slow == rank else 1.0
        factors = [
            factor
            for slow, first, end, factor in self.phases
            if slow == rank and first <= number < end
        ]
        return max(factors, default=1.0)


_DEVICE = _Device()


def read_phases(path: Path) -> None:
    """Begin to count, and take from a file when devices are slow."""
    _DEVICE.phases = json.loads(path.read_text("utf-8")) if path.exists() else []
    _DEVICE.calls = count()
    _DEVICE.now = path.with_name("slow-now.json")


class Nap(torch.autograd.Function):
    """The identity, which takes its time both ways; none while models are built."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Sleep, and return the same values."""
        slowness = _DEVICE.slowness() if dist.is_initialized() else 0.0
        ctx.backward_s = slowness * backward_s
        time.sleep(slowness * forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sleep, and return the same gradient."""
        time.sleep(ctx.backward_s)
        return gradient, None, None
