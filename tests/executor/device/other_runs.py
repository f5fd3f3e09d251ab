"""What else the product does with groups: a user's own loop, the baseline, and the measurement of links."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.executor import data_parallel
from planner.executor.data_parallel import DataParallelWorker, Rounds
from planner.executor.run import train
from planner.profiler.links import levels
from planner.workers.place import CPU
from tests.executor.device.rules import Recording
from tests.executor.device.runs import (
    PretendedGPUs,
    Run,
    StandInData,
    gather_nothing,
    make_context,
    record,
)
from tests.executor.device.world import World


def record_own_loop(run: Run) -> Recording:
    """As `record`, where no worker knows what comes next."""
    with patch.object(train, "_whole_stream", lambda *_: ()):
        return record(run)


def record_links(hosts: int, workers: int) -> Recording:
    """Measure the links between the workers of some hosts."""
    place, world = PretendedGPUs(CPU.compute, CPU.wire), World(hosts * workers)
    with ExitStack() as patched:
        patched.enter_context(patch.dict(os.environ, LOCAL_WORLD_SIZE=str(workers)))
        for name, few in {"_LATENCY_ROUNDS": 3, "_LEAST_ROUNDS": 3, "_SECONDS": 0.0}.items():
            patched.enter_context(patch.object(levels, name, few))
        return world.run(lambda _: levels.LevelMeasurement(place, timedelta(0), 64, 64).levels())


def record_baseline(workers: int) -> Recording:
    """Train with data parallelism. What DistributedDataParallel does with its group, a stand-in does."""
    world, run = World(workers), Run("1f1b", (workers,))
    with ExitStack() as patched:
        for name, replacement in {
            "peak_memory": lambda *_: SimpleNamespace(fields=dict),
            "WorkerReport": lambda **_: None,
            "gather_result": gather_nothing,
            "DistributedDataParallel": _Parallel,
            "module_options": lambda _: SimpleNamespace(compiled=False),
            "unsplit_loss": lambda model, *_: model(),
        }.items():
            patched.enter_context(patch.object(data_parallel, name, replacement))
        patched.enter_context(patch.object(StandInData, "batch", lambda *_: torch.zeros(1)))
        patched.enter_context(patch.object(DataParallelWorker, "_leaves_out_weights", lambda *_: False))
        rounds = Rounds(1, workers)
        return world.run(
            lambda rank: data_parallel._train(make_context(run, rank, world), rounds, nn.Linear(1, 1), None)
        )


class _Parallel(nn.Module):
    """Broadcasts the weights when it is made, and all-reduces gradients in the backward."""

    def __init__(self, model: nn.Module, process_group: Any, find_unused_parameters: bool) -> None:
        super().__init__()
        self.model, self._group, self.require_backward_grad_sync = model, process_group, True
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0, process_group)
            parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]

    def _reduce(self, parameter: Tensor) -> None:
        if self.require_backward_grad_sync:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self._group)

    def forward(self) -> Tensor:
        total: Tensor = self.model(torch.ones(1)).sum()
        return total
