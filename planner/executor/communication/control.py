"""The group for control traffic: barriers, reports, clocks, weights at the end, norms of gradients.

It is of all workers, over gloo, and takes tensors of the CPU, whatever device trains: what travels here must neither
wait for a GPU nor be a kernel on it. The messages between stages and the all-reduces of replicas have other groups.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported by a star import

from planner.devices.groups import GLOO
from planner.devices.meeting import nth_time, worker_store

TIMEOUT = timedelta(minutes=10)  # for a message, at least: a dead peer shows at once, a hung one in its heartbeat


def control_group() -> dist.ProcessGroup:
    """Return the group for control traffic: the default group, or one made at the first call, by all workers together.

    `join_group` makes the default group with gloo. A script with a loop of its own may have made it with NCCL.
    """
    world = dist.group.WORLD
    assert world is not None, "the workers have not joined"
    return world if dist.get_backend(world) == GLOO else _beside(world)


@lru_cache(maxsize=1)  # all workers make it at the same point, and once
def _beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(world), backend=GLOO)
    return group


def message_timeout(hang_timeout_s: float) -> timedelta:
    """Return how long a message may take: longer than it takes to find out by heartbeats which worker hangs."""
    return max(TIMEOUT, timedelta(seconds=5 * hang_timeout_s))


def join_group(timeout: timedelta = TIMEOUT) -> None:
    """Join the process group that torchrun's environment describes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The default group carries control traffic, on the CPU, whatever device trains: see `control_group`.
    store = worker_store(timeout)
    # The keys of an earlier group of this process have the addresses of connections that are gone.
    own = PrefixStore(f"group_{nth_time(store, 'group')}", store)
    dist.init_process_group(GLOO, store=own, rank=rank, world_size=world, timeout=timeout)
