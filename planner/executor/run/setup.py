"""Check what a worker needs before it trains: the other workers, and a plan that cannot deadlock."""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.executor.communication.control import control_group
from planner.executor.job import Job
from planner.formats.plan import Plan
from planner.formats.plan_shape import deadlock, shape_of
from planner.schedule.streams.check import ScheduleError, check_streams
from planner.version import __version__


def check_same_job(job: Job) -> None:
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
    mine = torch.tensor([digest], dtype=torch.int64)
    all_digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_digests, mine, control_group())
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
