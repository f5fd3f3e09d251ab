"""Where a worker computes and sends from, and the process group that it joins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.rendezvous import rendezvous

from planner.executor.communication.control import GLOO

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
        return "nccl" if self.wire.type == "cuda" else GLOO


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


def join_group(timeout: timedelta = TIMEOUT) -> None:
    """Join the process group that torchrun's environment describes."""
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    # With static rendezvous torchrun keeps its store when it restarts the workers, and in it the addresses of those
    # that have ended. So each start uses its own keys.
    start = PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    # The default group carries control traffic, on the CPU, whatever device trains: see `control_group`.
    dist.init_process_group(GLOO, store=start, rank=rank, world_size=world, timeout=timeout)
