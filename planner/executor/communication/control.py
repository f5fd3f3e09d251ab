"""Control traffic between workers: barriers, reports, clocks, weights at the end, norms of
gradients.

Its group is of all workers, over gloo, and takes tensors of the CPU, whatever device trains: what
travels here must neither wait for a GPU nor be a kernel on it. Messages between stages and
all-reduces of replicas have other groups.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported by a star import

from planner.workers.groups import GLOO
from planner.workers.job import Loss
from planner.workers.meeting import group_store, nth_time, worker_store

# for a message, at least: a dead peer shows at once, a hung one in its heartbeat
TIMEOUT = timedelta(minutes=10)


def control_group() -> dist.ProcessGroup:
    """Return the default group, or where a script made that with NCCL, one that all workers make at
    the first call.
    """
    world = dist.group.WORLD
    assert world is not None, "the workers have not joined"
    if dist.get_backend(world) == GLOO:
        return world
    return _beside(world)


@lru_cache(maxsize=1)
def _beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(world), backend=GLOO)
    return group


def message_timeout(hang_timeout_s: float) -> timedelta:
    """Return how long a message may take: longer than it takes to find out by heartbeats which
    worker hangs.
    """
    return max(TIMEOUT, timedelta(seconds=5 * hang_timeout_s))


def join_group(timeout: timedelta = TIMEOUT) -> None:
    """Join the process group that torchrun's environment describes: see `control_group`."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    number = nth_time(worker_store(timeout), "group")
    # The keys of an earlier group of this process have the addresses of connections that are gone.
    own = PrefixStore(f"group_{number}", group_store(timeout))
    dist.init_process_group(GLOO, store=own, rank=rank, world_size=world, timeout=timeout)


def gather_bytes(
    content: bytes, group: dist.ProcessGroup | None = None, ranks: Sequence[int] | None = None
) -> list[bytes]:
    """Return the `content` of each of `ranks`, by default all, on the first of them; an empty list
    elsewhere.
    """
    # Raw bytes, because torch's gather of objects unpickles what it receives.
    group = group or control_group()
    root, *others = range(dist.get_world_size()) if ranks is None else ranks
    # which refuses an empty buffer
    mine = torch.frombuffer(bytearray(content + b"."), dtype=torch.uint8)
    size = torch.tensor([len(mine)])
    if dist.get_rank() != root:
        dist.send(size, root, group)
        dist.send(mine, root, group)
        return []

    parts = [content]
    for rank in others:
        dist.recv(size, rank, group)
        part = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(part, rank, group)
        parts.append(part.numpy().tobytes()[:-1])

    return parts


def broadcast_bytes(content: bytes, group: dist.ProcessGroup) -> bytes:
    """Return rank 0's `content` on all workers of a gloo group."""
    buffer = torch.frombuffer(bytearray(content + b"."), dtype=torch.uint8)
    size = torch.tensor([len(buffer)])
    dist.broadcast(size, 0, group)
    if dist.get_rank() != 0:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, 0, group)
    return buffer.numpy().tobytes()[:-1]


def share(content: str, group: dist.ProcessGroup) -> list[str]:
    """Return the text of each worker on all of them; all workers of a gloo group call it."""
    texts = [text.decode() for text in gather_bytes(content.encode(), group)]
    shared: list[str] = json.loads(broadcast_bytes(json.dumps(texts).encode(), group))
    return shared


def merge_losses(parts: Iterable[str | bytes]) -> tuple[Loss, ...]:
    """Sum all workers' parts of each minibatch's loss, which come as JSON: lists of (minibatch,
    part).
    """
    total: defaultdict[int, float] = defaultdict(float)
    for part in parts:
        for minibatch, loss in json.loads(part):
            total[minibatch] += loss
    return tuple(
        Loss(minibatch=key, loss=total[key] if math.isfinite(total[key]) else None)
        for key in sorted(total)
    )
