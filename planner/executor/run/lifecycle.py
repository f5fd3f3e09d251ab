"""What frames every worker's training, with a pipeline or without: start, join, train together, leave."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import PlanError
from planner.executor.communication.control import control_group, join_group, message_timeout
from planner.executor.observe.memory import PeakMemory
from planner.executor.run.context import Context
from planner.schedule.instructions import Unit
from planner.workers.ending import abort_groups, keep_failures_ours
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.place import set_cuda_variables
from planner.workers.supervisor import Supervisor

T = TypeVar("T")
_NICER = 5  # the thread that computes than those that move messages


def start_worker(job: Job, heartbeat: Heartbeat | None = None) -> Heartbeat:
    """Check and set up this process; return its heartbeat.

    Raises:
        PlanError: when the plan needs another number of workers.
    """
    world, needed = int(os.environ["WORLD_SIZE"]), job.plan.workers
    if world != needed:
        raise PlanError(
            f"plan '{job.plan.config}' needs {needed} workers, but {world} were started",
            hint=f"start {needed}: --nnodes times --nproc-per-node of torchrun, or the tasks of srun",
        )
    torch.set_num_threads(job.plan.device.threads or 1)
    keep_failures_ours()
    set_cuda_variables()
    heartbeat = heartbeat or Heartbeat()
    heartbeat.enter("starting")
    return heartbeat


@contextmanager
def joined(context: Context, supervisor: Supervisor) -> Iterator[None]:
    """Join the other workers, unless that was done before, and leave them at the end.

    At an error the supervisor leaves the reason before anything that may block; then what was joined here is aborted.
    """
    context.heartbeat.enter("joining the other workers", meeting=True)
    joins = not dist.is_initialized()
    if joins:
        join_group(message_timeout(context.job.run_options.hang_timeout_s))
    try:
        supervisor.enter()
        yield
        supervisor.leave()
    except BaseException as error:
        if isinstance(error, Exception):
            supervisor.fail(error)
        if joins:
            abort_groups()
        raise
    if joins:
        dist.destroy_process_group()


def peak_memory(context: Context, modules: Iterable[nn.Module]) -> PeakMemory:
    """Measure from now on how much memory training needs, beside the weights and buffers of `modules`."""
    tensors = (tensor for module in modules for tensor in module.state_dict().values())
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return PeakMemory(context.place.compute, already_bytes=state_bytes)


def make_random_batches(context: Context, units: Iterable[Unit]) -> None:
    """Make the random batches of `units` before the start: made at first use, they would count as training time."""
    if context.data.random:
        context.heartbeat.enter("making random data")
        for unit in units:
            context.data.batch(unit)


def connect_all(context: Context) -> None:
    """Use every process group for data once; all workers call it, with nothing under way on their devices."""
    context.heartbeat.enter("connecting to the other workers", meeting=True)
    context.groups.use_once()


def train_together(context: Context, train: Callable[[], T]) -> tuple[float, T]:
    """Call `train` on all workers at the same time; return the seconds until the last is done, and its result."""
    connect_all(context)
    if context.place.kind == "cpu" and sys.platform == "linux":
        _let_messages_interrupt(threading.get_native_id())
    context.heartbeat.enter("waiting for the others to start", meeting=True)
    dist.barrier(control_group())
    start = time.perf_counter()
    result = train()
    context.heartbeat.enter("waiting for the last worker", meeting=True)
    dist.barrier(control_group())
    return time.perf_counter() - start, result


@cache  # once per thread, however many runs it trains
def _let_messages_interrupt(_thread: int) -> None:
    """Make this thread nicer than those of gloo.

    They move what a full socket has not taken at once. On a core that they share with the computation, Linux lets a
    woken thread wait until the running one has had its slice, unless that one is nicer: a message then arrives
    milliseconds late, and a synchronous pipeline waits for it. On Linux `nice` is of the calling thread alone.
    """
    os.nice(_NICER)
