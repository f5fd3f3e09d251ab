"""Exchange messages with known contents between all workers: `python -m planner.selftest.workers.exchange`.

Each worker sends to the next and receives from the one before, and all of them sum a tensor. The contents say who sent
them, so a message that is lost, late or another's shows.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported by a star import

from planner.formats.files import Record, save_record
from planner.formats.names import Backend
from planner.selftest.workers.start import TIMEOUT_S

SIZES = (1, 1_000, 1_000_000)  # elements of float32
ROUNDS = 10


class Task(Record):
    """What to exchange, and over what."""

    backend: Backend
    store: str  # a file by which the workers meet


class Exchanged(Record):
    """What one worker found."""

    wrong: str = ""  # the first message or sum that was not what it should be
    short_s: float = 0.0  # of a message of one number there and one back, median
    long_s: float = 0.0  # of the longest messages, likewise
    all_reduce_s: float = 0.0  # of the longest tensor, median


def exchange(task: Task) -> Exchanged:
    """Exchange with the other workers of the environment."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if task.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = FileStore(task.store, world)
    dist.init_process_group(
        task.backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    times_s: dict[int, list[float]] = {size: [] for size in SIZES}
    sums_s: list[float] = []
    for number in range(ROUNDS):
        for size in SIZES:
            start = time.perf_counter()
            if wrong := _around(rank, world, size, number, device):
                return Exchanged(wrong=wrong)
            times_s[size].append(time.perf_counter() - start)
        start = time.perf_counter()
        if wrong := _summed(rank, world, number, device):
            return Exchanged(wrong=wrong)
        sums_s.append(time.perf_counter() - start)
    return Exchanged(short_s=median(times_s[SIZES[0]]), long_s=median(times_s[SIZES[-1]]), all_reduce_s=median(sums_s))


def _around(rank: int, world: int, size: int, number: int, device: torch.device) -> str:
    """Send to the next worker, receive from the one before; return what is wrong."""
    if world == 1:
        return ""
    before, after = (rank - 1) % world, (rank + 1) % world
    mine = torch.full((size,), float(number * world + rank), device=device)
    theirs = torch.empty_like(mine)
    # Together, because NCCL may run one only when its peer runs the other.
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]):
        work.wait()
    expected = float(number * world + before)
    if bool((theirs == expected).all()):
        return ""
    return f"worker {rank} received {float(theirs[0]):g} from worker {before}, which had sent {expected:g}"


def _summed(rank: int, world: int, number: int, device: torch.device) -> str:
    """Sum a tensor over all workers; return what is wrong."""
    values = torch.full((SIZES[-1],), float(number + rank), device=device)
    dist.all_reduce(values)
    expected = float(number * world + world * (world - 1) // 2)
    if bool((values == expected).all()):
        return ""
    return f"worker {rank} has the sum {float(values[0]):g}, and not {expected:g}"


if __name__ == "__main__":
    found = exchange(Task.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8")))
    save_record(found, sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # the group is not left: a worker that found something wrong does not wait for the others
