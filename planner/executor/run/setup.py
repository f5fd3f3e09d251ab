"""Check what a worker needs before it trains: its device, the other workers, and a plan that cannot deadlock."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.rendezvous import rendezvous

from planner.errors import PlanError
from planner.executor.job import Job
from planner.formats.plan import Plan
from planner.formats.plan_shape import deadlock, shape_of
from planner.schedule.streams.check import ScheduleError, check_streams
from planner.version import __version__

TIMEOUT = timedelta(minutes=10)  # for a message, at least: a dead peer shows at once, a hung one in its heartbeat


@dataclass(frozen=True)
class Place:
    """The device that a worker computes on, and the one that its messages are made on.

    NCCL sends from the GPU, gloo from the CPU.
    """

    compute: torch.device
    wire: torch.device

    @property
    def backend(self) -> str:
        """The backend of torch.distributed."""
        return "nccl" if self.wire.type == "cuda" else "gloo"


CPU = Place(torch.device("cpu"), torch.device("cpu"))


def local_place() -> Place:
    """Choose a GPU and NCCL, if there is one for each local worker; otherwise they share the GPUs, with gloo."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        return CPU
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    # NCCL does not allow two processes on one GPU.
    shared = gpus < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Place(device, torch.device("cpu") if shared else device)


def message_timeout(hang_timeout_s: float) -> timedelta:
    """Return how long a message may take: longer than it takes to find out by heartbeats which worker hangs."""
    return max(TIMEOUT, timedelta(seconds=5 * hang_timeout_s))


def join_group(place: Place, timeout: timedelta = TIMEOUT) -> None:
    """Join the process group that torchrun's environment describes."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    # With static rendezvous torchrun keeps its store when it restarts the workers, and in it the addresses of those
    # that have ended. So each start uses its own keys.
    start = PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(place.backend, store=start, rank=rank, world_size=world, timeout=timeout)


def check_same_job(job: Job, wire: torch.device) -> None:
    """Check that all workers run the same job: messages carry no headers, and match by their order alone.

    Raises:
        PlanError: when hosts were given different plans, options or versions.
    """
    own: dict[str, bool | set[str]] = dict.fromkeys(
        ("model", "run", "result_path", "failure_folder", "show_progress"), True
    )
    own |= {"run_options": {"interface"}, "checkpoints": {"resume"}}  # may differ between hosts
    text = f"{__version__} {torch.__version__} {job.model_dump_json(exclude=own)}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    mine = torch.tensor([digest], dtype=torch.int64, device=wire)
    all_digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_digests, mine)
    for rank, other in enumerate(all_digests):
        if int(other) != int(all_digests[0]):
            raise PlanError(
                f"worker {rank} was started with another plan, other arguments or other versions than worker 0",
                hint="give all hosts the same plan, the same arguments, and the same versions of planner and torch",
            )


def check_world(plan: Plan) -> None:
    """Check that as many processes were started as the plan has workers.

    Raises:
        PlanError: when they were not.
    """
    world, needed = int(os.environ["WORLD_SIZE"]), plan.workers
    if world != needed:
        raise PlanError(
            f"plan '{plan.config}' needs {needed} workers, but {world} were started",
            hint=f"start torchrun with --nnodes times --nproc-per-node = {needed}",
        )


def check_schedule(plan: Plan) -> None:
    """Check that the plan's streams run to their end: with depths edited by hand they may deadlock.

    Raises:
        PlanError: when they do.
    """
    deepest = max(stage.in_flight for stage in plan.stages)
    try:
        check_streams(shape_of(plan), minibatches=4 * max(plan.replicas) * deepest)
    except ScheduleError:
        raise deadlock(plan) from None
