"""How workers meet: through a store, before they choose a GPU, build a model on it, and make process groups."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from itertools import count

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.rendezvous import rendezvous

from planner.devices import slurm
from planner.devices.seats import Seat
from planner.errors import WorkerError

_rounds = count()


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
    return _rendezvous(timeout)


@cache
def _rendezvous(timeout: timedelta) -> Store:
    """Connect to the store that torchrun's environment describes, once: worker 0 may be the one that opens it."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # With static rendezvous torchrun keeps its store when it restarts the workers, and in it the addresses of those
    # that have ended. So each start uses its own keys.
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def exchange(store: Store, mine: Seat) -> list[Seat]:
    """Tell all workers about this one, and return what all say, by rank; waits for the last, up to the store's limit.

    Every call has its own keys, because a script may train several pipelines, one after the other.

    Raises:
        WorkerError: when a worker does not come.
    """
    prefix = f"seat/{next(_rounds)}"
    store.set(f"{prefix}/{mine.rank}", mine.model_dump_json())
    return [_seat(store, f"{prefix}/{rank}", rank) for rank in range(int(os.environ["WORLD_SIZE"]))]


def _seat(store: Store, key: str, rank: int) -> Seat:
    try:
        return Seat.model_validate_json(store.get(key))
    except dist.DistStoreError as cause:  # a time-out; a store that is lost raises DistNetworkError
        raise WorkerError(
            f"worker {rank} did not come in time",
            hint="is the command started on all hosts, with the same plan?",
        ) from cause
