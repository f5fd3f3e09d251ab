"""Gather results of all workers on rank 0, and tell all what rank 0 knows."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from planner.executor.communication.control import control_group
from planner.executor.job import Loss


def gather_bytes(
    content: bytes, group: dist.ProcessGroup | None = None, ranks: Sequence[int] | None = None
) -> list[bytes]:
    """Return the `content` of each of `ranks`, by default all, on the first of them; an empty list elsewhere.

    Raw bytes, because torch's gather of objects unpickles what it receives.

    Args:
        group: a gloo group; by default that of control traffic.
    """
    group = group or control_group()
    root, *others = range(dist.get_world_size()) if ranks is None else ranks
    # torch.frombuffer refuses an empty buffer, so at least one byte travels.
    mine = torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)
    size = torch.tensor([len(content)])
    if dist.get_rank() != root:
        dist.send(size, root, group)
        dist.send(mine, root, group)
        return []
    parts = [content]
    for rank in others:
        dist.recv(size, rank, group)
        part = torch.empty(max(1, int(size)), dtype=torch.uint8)
        dist.recv(part, rank, group)
        parts.append(part.numpy().tobytes()[: int(size)])
    return parts


def broadcast_bytes(content: bytes, group: dist.ProcessGroup) -> bytes:
    """Return rank 0's `content` on all workers of a gloo group."""
    size = torch.tensor([len(content)])
    dist.broadcast(size, 0, group)
    buffer = torch.empty(max(1, int(size)), dtype=torch.uint8)
    if dist.get_rank() == 0 and content:
        buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(buffer, 0, group)
    return buffer.numpy().tobytes()[: int(size)]


def encode_losses(losses: Iterable[tuple[int, float]]) -> bytes:
    """Encode (minibatch, part of its loss) pairs as JSON."""
    return json.dumps(list(losses)).encode()


def merge_losses(parts: Iterable[bytes]) -> tuple[Loss, ...]:
    """Sum the parts of each minibatch's loss; the result is in order of the minibatches."""
    total: defaultdict[int, float] = defaultdict(float)
    for part in parts:
        for minibatch, loss in json.loads(part):
            total[minibatch] += loss
    return tuple(
        Loss(minibatch=minibatch, loss=total[minibatch] if math.isfinite(total[minibatch]) else None)
        for minibatch in sorted(total)
    )
