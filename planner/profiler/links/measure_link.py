"""Measure the link between two processes on this machine: point to point over gloo, as the executor uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from planner.devices.groups import GLOO, DataGroups
from planner.devices.place import CPU
from planner.errors import WorkerError
from planner.profiler.links.exchange import SHORT_BYTES, Endpoint

DEFAULT_MESSAGE_BYTES = 4_000_000
DEFAULT_TIMEOUT_S = 60.0
_LATENCY_ROUNDS = 200
_BANDWIDTH_SECONDS = 1.0
_ALL_REDUCES = 10
BUCKET_BYTES = 25_000_000  # the executor's largest bucket
_RESULT = "result.json"


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of one direction while the other carries as much.

    Attributes:
        bandwidth_bytes_per_s: from long messages, latency subtracted.
        latency_s: half the round trip of a short message.
        all_reduce_bandwidth_bytes_per_s: bytes that each process sends in an all-reduce, per second.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    all_reduce_bandwidth_bytes_per_s: float


def measure_link(
    *, message_bytes: int = DEFAULT_MESSAGE_BYTES, interface: str = "lo", timeout_s: float = DEFAULT_TIMEOUT_S
) -> LinkSpeed:
    """Measure the link between two new processes on this machine, in a few seconds.

    Args:
        interface: network interface, unless GLOO_SOCKET_IFNAME names one.
        timeout_s: for everything; both processes have ended when this function returns or raises.

    Raises:
        WorkerError: when a process fails or does not end in time.
    """
    environment = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"} | dict(os.environ)
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="plan-link-") as folder, ExitStack() as processes:
        # Processes of their own, not forks: a caller that has used PyTorch's threads cannot fork safely.
        command = [sys.executable, "-m", __name__, folder, str(message_bytes), str(timeout_s)]
        workers = [
            processes.enter_context(
                subprocess.Popen(
                    [*command, str(rank)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
            )
            for rank in range(2)
        ]
        try:
            for rank, worker in enumerate(workers):
                _, error = worker.communicate(timeout=max(0.0, deadline - time.monotonic()))
                if worker.returncode:
                    reason = (error.strip().splitlines() or [f"exit code {worker.returncode}"])[-1]
                    raise WorkerError(
                        f"the link cannot be measured, process {rank} failed: {reason}",
                        hint="name the network interface in GLOO_SOCKET_IFNAME",
                    )
        except subprocess.TimeoutExpired:
            raise WorkerError(
                f"the link was not measured within {timeout_s:g} s",
                hint="is the network interface in GLOO_SOCKET_IFNAME up?",
            ) from None
        finally:
            for worker in workers:
                worker.kill()
        return LinkSpeed(**json.loads((Path(folder) / _RESULT).read_text(encoding="utf-8")))


def _worker(folder: Path, message_bytes: int, timeout_s: float, rank: int) -> None:
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(GLOO, store, rank=rank, world_size=2, timeout=timeout)
    try:
        speed = _measure(Endpoint(DataGroups(CPU, timeout), CPU.wire, [(0, 1)]), message_bytes)
        if rank == 0:
            (folder / _RESULT).write_text(json.dumps(asdict(speed)), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _measure(end: Endpoint, message_bytes: int) -> LinkSpeed:
    peer = 1 - end.rank
    latency_s = median(end.exchange_s(peer, SHORT_BYTES, _LATENCY_ROUNDS))
    once_s = median(end.exchange_s(peer, message_bytes, rounds=5))
    # Each process has measured its own time, and both must run the same number of rounds.
    rounds = torch.tensor([max(5, int(_BANDWIDTH_SECONDS / once_s))])
    dist.broadcast(rounds, src=0)
    long_s = median(end.exchange_s(peer, message_bytes, int(rounds)))
    # On a busy machine a short exchange may take as long as a long one; then there is nothing to subtract.
    transfer_s = max(long_s - latency_s, long_s / 2)
    # A ring of two processes moves the bytes of a bucket once: 2(r-1)/r = 1.
    all_reduce_s = median(end.all_reduce_s(torch.ones(BUCKET_BYTES // 4), _ALL_REDUCES))
    return LinkSpeed(message_bytes / transfer_s, latency_s, BUCKET_BYTES / all_reduce_s)


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
