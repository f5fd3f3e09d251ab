"""How workers meet: through a store, before they choose a GPU, build a model on it, and make process groups."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.rendezvous import rendezvous

from planner.devices import slurm
from planner.devices.seats import Seat
from planner.errors import WorkerError


def started_as_worker() -> bool:
    """Return whether torchrun, or Slurm without it, started this process as one of several workers.

    Slurm's environment becomes torchrun's, which everything else reads.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        slurm.become_worker()
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def worker_store(timeout: timedelta) -> Store:
    """Return the store by which the workers meet: that of the process group, where there is one already."""
    if dist.is_initialized():
        store: Store = dist.distributed_c10d._get_default_store()
        return store
    return _rendezvous(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", timeout)


@lru_cache(maxsize=1)
def _rendezvous(address: str, timeout: timedelta) -> Store:
    """Connect to the store that torchrun's environment describes, once per address: worker 0 may have to open it."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # With static rendezvous torchrun keeps its store when it restarts the workers, and in it the addresses of those
    # that have ended. So each start uses its own keys.
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def exchange(store: Store, mine: Seat) -> list[Seat]:
    """Tell all workers about this one, and return what all say, by rank; waits for the last, up to the store's limit.

    Raises:
        WorkerError: when a worker does not come.
    """
    prefix = f"seat/{nth_time(store, 'seat')}"
    store.set(f"{prefix}/{mine.rank}", mine.model_dump_json())
    return [_seat(store, f"{prefix}/{rank}", rank) for rank in range(int(os.environ["WORLD_SIZE"]))]


def nth_time(store: Store, what: str) -> int:
    """Count how often this worker has done `what` by this store, now included, for keys that are not used again.

    A script may train several pipelines, one after the other, and all workers do so in the same order.
    """
    count: int = store.add(f"{what}/times/{os.environ['RANK']}", 1)
    return count


def _seat(store: Store, key: str, rank: int) -> Seat:
    try:
        return Seat.model_validate_json(store.get(key))
    except dist.DistStoreError as cause:  # a time-out; a store that is lost raises DistNetworkError
        raise WorkerError(
            f"worker {rank} did not come in time",
            hint="is the command started on all hosts, with the same plan?",
        ) from cause
