"""A model of twelve small layers that emulates a device: blocks sleep for their time, and compute as they always do.

It tells of its updates in the file `updates`, and under `ELASTIC_HOST` lets faults happen at what its workers do.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from planner.workers.heartbeat import Heartbeat

WIDTH = int(os.environ.get("ELASTIC_WIDTH", "16"))
FORWARD_S, BACKWARD_S = 0.002, 0.004  # of a block, for a microbatch
SLEEPS = "ELASTIC_AT_ONCE" not in os.environ  # a reference, of which only the losses count, need not
BLOCKS = 10
STRUCK = Path("struck")
_PHASES = {"evaluat": "evaluation", "checkpoint": "checkpoint", "aside": "copy"}
_WHILE_COPYING_S = 0.03  # after the state was set aside, while the thread copies it


def _began_s() -> float:
    """Return when this process began, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc_pid_stat(5): starttime
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")


_BEGAN_S, _IMPORTED_S = _began_s(), time.time()


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
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4))


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
    """Append when this process began, had imported, and updated, which minibatch, and how many workers there are."""
    if metrics and any("loss" in name for name in metrics):  # of an evaluation
        return
    with Path("updates").open("a", encoding="utf-8") as file:
        entry = (_BEGAN_S, _IMPORTED_S, time.time(), minibatch, int(os.environ["WORLD_SIZE"]))
        file.write(json.dumps(entry) + "\n")


def _phase(what: object, evaluating: bool) -> str:
    """Return what a worker does, by the instruction or the activity that its heartbeat is told."""
    if isinstance(what, str):
        return next((phase for words, phase in _PHASES.items() if words in what), "other")
    names = {"Forward": "forward", "AllReduce": "all-reduce", "Update": "update"}
    name = type(what).__name__
    phase = "backward" if name.startswith("Backward") else names.get(name, "message")
    return "evaluation" if evaluating else phase


def _listening(told: Callable[..., None], wish: Path) -> Callable[..., None]:
    """Wrap a method of Heartbeat: a fault that is wished for this worker happens in the phase that it names."""

    def tell(self: Heartbeat, what: Any, **flags: bool) -> None:
        told(self, what, **flags)
        if not wish.exists():
            return
        phase, act = wish.read_text(encoding="utf-8").split()
        if phase == _phase(what, flags.get("evaluating", False)):
            wish.unlink()
            if phase == "copy":
                threading.Timer(_WHILE_COPYING_S, _strike, (act,)).start()
            else:
                _strike(act)

    return tell


def _strike(act: str) -> None:
    hidden = STRUCK.with_name(".struck")
    hidden.write_text(str(time.time()), encoding="utf-8")
    hidden.rename(STRUCK)
    if act != "hold":
        os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)
    while STRUCK.exists():  # until the benchmark has taken the host or its link
        time.sleep(0.001)


if "ELASTIC_HOST" in os.environ and "RANK" in os.environ and Heartbeat.begin.__name__ == "begin":
    _wish = Path(f"wish-{os.environ['ELASTIC_HOST']}-{os.environ['LOCAL_RANK']}")
    Heartbeat.begin = _listening(Heartbeat.begin, _wish)  # type: ignore[method-assign]
    Heartbeat.enter = _listening(Heartbeat.enter, _wish)  # type: ignore[method-assign]
