"""A model of twelve small layers that emulates a device: blocks sleep for their time, and compute
as they always do.

It tells of its updates in the file `updates`. The folder `hook` lets faults happen at what its
workers do.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH = int(os.environ.get("ELASTIC_WIDTH", "16"))
FORWARD_S, BACKWARD_S = 0.002, 0.004  # of a block, for a microbatch
# a reference, of which only the losses count, need not
SLEEPS = "ELASTIC_AT_ONCE" not in os.environ
BLOCKS = 10


def _began_s() -> float:
    """Return when this process began, in seconds since the epoch."""
    # proc_pid_stat(5): starttime
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")


_BEGAN_S = _began_s()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        time.sleep(FORWARD_S * SLEEPS)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S * SLEEPS)
        return gradient


class Block(nn.Module):
    """A layer of an emulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, value: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(value)  # type: ignore[no-untyped-call]
        changed: Tensor = self.dropout(torch.tanh(self.linear(slept)))
        return value + changed


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4)
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks, because workers start faster when they need not trace the model."""
    return list(model.children())


def example_batch(batch_size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    return (torch.randn(batch_size, 8),), torch.randint(0, 4, (batch_size,))


class Points(Dataset[Any]):
    """Random points of four classes."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        x = torch.randn(8, generator=torch.Generator().manual_seed(self._first + index))
        return (x,), (x[0] > 0).long() + 2 * (x[1] > 0).long()


def dataset() -> Dataset[Any]:
    return Points(0, 1000)


def evaluation_dataset() -> Dataset[Any]:
    return Points(1000, 32)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003)


def on_update(minibatch: int, loss: float, metrics: Any) -> None:
    """Append when this process began, had imported, and updated, which minibatch, and how many
    workers there are.
    """
    if metrics and any("loss" in name for name in metrics):  # of an evaluation
        return
    with Path("updates").open("a", encoding="utf-8") as file:
        imported_s = float(os.environ.get("ELASTIC_IMPORTED_S", "nan"))
        entry = (_BEGAN_S, imported_s, time.time(), minibatch, int(os.environ["WORLD_SIZE"]))
        file.write(json.dumps(entry) + "\n")
