"""The store by which the workers meet, and the process group that they join."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.rendezvous import rendezvous

from planner.executor.communication.control import GLOO

TIMEOUT = timedelta(minutes=10)  # for a message, at least: a dead peer shows at once, a hung one in its heartbeat


def message_timeout(hang_timeout_s: float) -> timedelta:
    """Return how long a message may take: longer than it takes to find out by heartbeats which worker hangs."""
    return max(TIMEOUT, timedelta(seconds=5 * hang_timeout_s))


def worker_store(timeout: timedelta = TIMEOUT) -> Store:
    """Return the store by which the workers meet: that of the process group, where there is one already."""
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()
        return store
    return _rendezvous(timeout)


@cache
def _rendezvous(timeout: timedelta) -> Store:
    """Connect to the store that torchrun's environment describes, once: worker 0 may be the one that opens it."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # With static rendezvous torchrun keeps its store when it restarts the workers, and in it the addresses of those
    # that have ended. So each start uses its own keys.
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def join_group(timeout: timedelta = TIMEOUT) -> None:
    """Join the process group that torchrun's environment describes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The default group carries control traffic, on the CPU, whatever device trains: see `control_group`.
    dist.init_process_group(GLOO, store=_rendezvous(timeout), rank=rank, world_size=world, timeout=timeout)
