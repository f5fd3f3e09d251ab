"""The process group that all workers join, and how long its messages may take."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from planner.devices.groups import GLOO
from planner.devices.meeting import worker_store

TIMEOUT = timedelta(minutes=10)  # for a message, at least: a dead peer shows at once, a hung one in its heartbeat


def message_timeout(hang_timeout_s: float) -> timedelta:
    """Return how long a message may take: longer than it takes to find out by heartbeats which worker hangs."""
    return max(TIMEOUT, timedelta(seconds=5 * hang_timeout_s))


def join_group(timeout: timedelta = TIMEOUT) -> None:
    """Join the process group that torchrun's environment describes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The default group carries control traffic, on the CPU, whatever device trains: see `control_group`.
    dist.init_process_group(GLOO, store=worker_store(timeout), rank=rank, world_size=world, timeout=timeout)
