"""Run one process of a baseline as a PyTorch user would write it: plain loop, DDP, torch.distributed.pipelining.

torchrun starts it once per host. Rank 0 prints {"samples_per_s": ...} for a window of whole steps after a warm-up.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from planner.profiler.measured.malloc import keep_freed_pages

WARM_UP_STEPS = 5
BATCHES = 8  # random minibatches, used in turn as in `plan train`, because making new ones would be timed, too
Step = Callable[[], None]


def main() -> None:
    """Run one contender and print its rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=sorted(STEPS))
    parser.add_argument("--model", required=True, help="transformer or vgg_like")
    parser.add_argument("--batch-size", type=int, required=True, help="samples per minibatch")
    parser.add_argument("--microbatches", type=int, default=1, help="per minibatch")
    parser.add_argument("--cut", type=int, default=0, help="children of the model in the first stage")
    parser.add_argument("--seconds", type=float, required=True, help="length of the measured window")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_pages()  # as `plan train` does, so that schedules are compared and not allocators
    dist.init_process_group("gloo")
    module = importlib.import_module(f"benchmarks.two_cores.{arguments.model}")
    step, samples = STEPS[arguments.contender](module, arguments)
    samples_per_s, steps = measure(step, samples, arguments.seconds)
    if dist.get_rank() == 0:
        cores = sorted(os.sched_getaffinity(0))
        print(json.dumps({"samples_per_s": samples_per_s, "steps": steps, "cores": cores}), flush=True)
    dist.destroy_process_group()
    # With DistributedDataParallel over gloo, the interpreter's own teardown sometimes hangs.
    sys.stdout.flush()
    os._exit(0)


def measure(step: Step, samples: int, seconds: float) -> tuple[float, int]:
    """Return the samples per second over all ranks, and the number of steps in the window.

    Args:
        step: one optimizer step, called by every rank equally often.
        samples: processed in one step by all ranks together.
        seconds: approximate length of the window; every rank does the same number of steps.
    """
    for _ in range(WARM_UP_STEPS):
        step()
    begin = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
    per_step = torch.tensor((time.perf_counter() - begin) / WARM_UP_STEPS)
    dist.all_reduce(per_step, op=dist.ReduceOp.MAX)
    steps = max(WARM_UP_STEPS, math.ceil(seconds / per_step.item()))
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()  # the slowest rank ends the window
    return samples * steps / (time.perf_counter() - begin), steps


def plain(module: ModuleType, arguments: argparse.Namespace) -> tuple[Step, int]:
    """Train the unsplit model; two ranks share nothing, which is the most that two cores can do."""
    model = module.build_model()
    return _local_step(module, model, arguments.batch_size), arguments.batch_size * dist.get_world_size()


def ddp(module: ModuleType, arguments: argparse.Namespace) -> tuple[Step, int]:
    """Train with DDP, the minibatch divided over the ranks: the same batch per update as the pipelines."""
    model = DistributedDataParallel(module.build_model(), gradient_as_bucket_view=True)
    return _local_step(module, model, arguments.batch_size // dist.get_world_size()), arguments.batch_size


def ddp_each(module: ModuleType, arguments: argparse.Namespace) -> tuple[Step, int]:
    """Train with DDP and a whole minibatch per rank: half the all-reduces per sample, twice the batch per update."""
    model = DistributedDataParallel(module.build_model(), gradient_as_bucket_view=True)
    return _local_step(module, model, arguments.batch_size), arguments.batch_size * dist.get_world_size()


def _batches(module: ModuleType, batch_size: int) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    return itertools.cycle([module.example_batch(batch_size) for _ in range(BATCHES)])


def _local_step(module: ModuleType, model: nn.Module, batch_size: int) -> Step:
    optimizer = module.optimizer(model.parameters())
    batches = _batches(module, batch_size)

    def step() -> None:
        args, target = next(batches)
        optimizer.zero_grad()
        module.loss(model(*args), target).backward()
        optimizer.step()

    return step


def torch_1f1b(module: ModuleType, arguments: argparse.Namespace) -> tuple[Step, int]:
    """Train with torch.distributed.pipelining's synchronous 1F1B."""
    return _torch_pipeline(Schedule1F1B, module, arguments)


def torch_gpipe(module: ModuleType, arguments: argparse.Namespace) -> tuple[Step, int]:
    """Train with torch.distributed.pipelining's GPipe."""
    return _torch_pipeline(ScheduleGPipe, module, arguments)


def _torch_pipeline(schedule_type: Any, module: ModuleType, arguments: argparse.Namespace) -> tuple[Step, int]:
    children = list(module.build_model().children())
    parts = (children[: arguments.cut], children[arguments.cut :])
    rank = dist.get_rank()
    part = nn.Sequential(*parts[rank])
    optimizer = module.optimizer(part.parameters())
    batches = _batches(module, arguments.batch_size)
    stage = PipelineStage(part, rank, len(parts), torch.device("cpu"))
    schedule = schedule_type(stage, n_microbatches=arguments.microbatches, loss_fn=module.loss)

    def step() -> None:
        args, target = next(batches)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(*args)
        else:
            schedule.step(target=target)
        optimizer.step()

    return step, arguments.batch_size


STEPS: dict[str, Callable[[ModuleType, argparse.Namespace], tuple[Step, int]]] = {
    "plain": plain,
    "ddp": ddp,
    "ddp-each": ddp_each,
    "torch-1f1b": torch_1f1b,
    "torch-gpipe": torch_gpipe,
}

if __name__ == "__main__":
    main()
