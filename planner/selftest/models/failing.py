"""A model whose optimizer fails on one worker, as the environment says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FAULT, MARK = "PLAN_SELFTEST_FAULT", "PLAN_SELFTEST_MARK"  # in the environment: which fault, and a file for its time
WIDTH, CLASSES, LAYERS = 8, 4, 16
STEP = 6  # the update that fails
MUCH = 2**50  # elements, more than any address space has


class Failing(torch.optim.SGD):
    """SGD that fails in an update of worker 0."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        fault = os.environ.get(FAULT)
        if self.steps == STEP and fault is not None and os.environ.get("RANK") == "0":
            Path(os.environ[MARK]).write_text(repr(time.time()), encoding="utf-8")
            FAULTS[fault](self.param_groups[0]["params"][0])
        return super().step(closure)


def _raise(_: Tensor) -> None:
    raise ValueError("injected by the self-test")


def _exhaust(weight: Tensor) -> None:
    torch.empty(MUCH, device=weight.device)


def _spoil(weight: Tensor) -> None:
    weight.data.fill_(float("nan"))


def _kill(_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[Tensor], None]] = {
    "exception": _raise,
    "out of memory": _exhaust,
    "nan": _spoil,
    "killed": _kill,
}


def build_model() -> nn.Module:
    """Return some linear layers."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def example_batch(batch_size: int) -> tuple[tuple[Tensor], Tensor]:
    """Return random samples."""
    return (torch.randn(batch_size, WIDTH),), torch.randint(0, CLASSES, (batch_size,))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(output, target)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that fails."""
    return Failing(parameters, lr=0.01)
