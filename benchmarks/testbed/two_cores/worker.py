"""Run one process of a baseline as a PyTorch user would write it: plain loop, DDP,
torch.distributed.pipelining.

It trains until it is ended, in the environment that torchrun sets, and marks each optimizer step
(`marks.py`).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.testbed.two_cores.marks import Marker
from planner.profiler.this_machine import keep_freed_pages

# random minibatches, used in turn as in `plan train`, because making new ones would be timed, too
BATCHES = 8
Step = Callable[[], None]


def main() -> None:
    """Run one contender for ever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=sorted(STEPS))
    parser.add_argument("--model", required=True, help="transformer or vgg_like")
    parser.add_argument("--batch-size", type=int, required=True, help="samples per minibatch")
    parser.add_argument("--microbatches", type=int, default=1, help="per minibatch")
    parser.add_argument(
        "--cut", type=int, default=0, help="children of the model in the first stage"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_pages()  # as `plan train` does, so that schedules are compared and not allocators
    dist.init_process_group("gloo")
    module = importlib.import_module(f"benchmarks.testbed.two_cores.{arguments.model}")
    step = STEPS[arguments.contender](module, arguments)
    # Of processes that do one minibatch together, the first one marks it.
    marker = Marker() if dist.get_rank() == 0 else None
    for done in itertools.count(1):
        step()
        if marker is not None:
            marker.mark(done)


def plain(module: ModuleType, arguments: argparse.Namespace) -> Step:
    """Train the unsplit model."""
    model = module.build_model()
    return _local_step(module, model, arguments.batch_size)


def ddp(module: ModuleType, arguments: argparse.Namespace) -> Step:
    """Train with DDP, the minibatch divided over the ranks: the same batch per update as the
    pipelines.
    """
    model = DistributedDataParallel(module.build_model(), gradient_as_bucket_view=True)
    return _local_step(module, model, arguments.batch_size // dist.get_world_size())


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


def torch_1f1b(module: ModuleType, arguments: argparse.Namespace) -> Step:
    """Train with torch.distributed.pipelining's synchronous 1F1B."""
    children = list(module.build_model().children())
    parts = (children[: arguments.cut], children[arguments.cut :])
    rank = dist.get_rank()
    part = nn.Sequential(*parts[rank])
    optimizer = module.optimizer(part.parameters())
    batches = _batches(module, arguments.batch_size)
    stage = PipelineStage(part, rank, len(parts), torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=arguments.microbatches, loss_fn=module.loss)

    def step() -> None:
        args, target = next(batches)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(*args)
        else:
            schedule.step(target=target)
        optimizer.step()

    return step


STEPS: dict[str, Callable[[ModuleType, argparse.Namespace], Step]] = {
    "plain": plain,
    "ddp": ddp,
    "torch-1f1b": torch_1f1b,
}

if __name__ == "__main__":
    main()
