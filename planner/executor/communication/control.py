"""The group for control traffic: barriers, reports, clocks, weights at the end, norms of gradients.

It is of all workers, over gloo, and takes tensors of the CPU, whatever device trains: what travels here must neither
wait for a GPU nor be a kernel on it. The messages between stages and the all-reduces of replicas have other groups.
"""

from __future__ import annotations

from functools import lru_cache

import torch.distributed as dist

from planner.devices.groups import GLOO


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
