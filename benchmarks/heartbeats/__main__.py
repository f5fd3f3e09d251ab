"""Measure what watching over many workers costs. See README.md in this folder.

python -m benchmarks.heartbeats 16 64 256
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NoReturn

import torch
from tabulate import tabulate
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported by a star import

from benchmarks.kills.plans import MODEL, write_plan
from planner.errors import PlannerError
from planner.formats.plan import load_plan
from planner.schedule.instructions import Forward, Unit
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.supervisor import Supervisor

HOST, BEAT_S = "127.0.0.1", 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure every number of workers and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workers", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="how long each number of workers is measured"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for workers in arguments.workers:  # first, because processes with threads must not fork
            write_plan(str(workers), "1f1b", Path(folder))
        rows = [measure(workers, arguments.seconds, Path(folder)) for workers in arguments.workers]
    headers = [
        "workers",
        "cores, all watches",
        "of these the busiest",
        "cores, store",
        "seconds between exchanges",
    ]
    print(tabulate(rows, headers, tablefmt="github"))


def measure(workers: int, seconds: float, folder: Path) -> list[object]:
    """Return a row: processor time per second, in cores, and how often each worker exchanged its
    heartbeat.
    """
    job = Job(model=str(MODEL), plan=load_plan(write_plan(str(workers), "1f1b", folder)))
    ports, port_of = os.pipe()
    store_pid = os.fork()
    if store_pid == 0:
        _hold_store(port_of)
    port = int(os.read(ports, 16))
    pids = [_fork_worker(job, rank, port) for rank in range(workers)]
    try:
        store = PrefixStore(
            "plan/0", TCPStore(HOST, port, is_master=False, timeout=timedelta(minutes=5))
        )
        store.wait([f"page/{rank}" for rank in range(workers)])
        time.sleep(5)  # all have seen all others
        began_s, pages, spent = (
            time.monotonic(),
            _exchanges(store, workers),
            _spent(store_pid, *pids),
        )
        time.sleep(seconds)
        ended_s, later, after = (
            time.monotonic(),
            _exchanges(store, workers),
            _spent(store_pid, *pids),
        )
    finally:
        for pid in (*pids, store_pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    used = {pid: (after[pid] - spent[pid]) / (ended_s - began_s) for pid in spent}
    own = [used[pid] for pid in pids]
    between_s = (ended_s - began_s) * workers / max(1, later - pages)
    return [
        workers,
        f"{sum(own):.3f}",
        f"{max(own):.4f}",
        f"{used[store_pid]:.3f}",
        f"{between_s:.2f}",
    ]


def _hold_store(port_of: int) -> NoReturn:
    """Hold the store, as torchrun's agent does."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    os.write(port_of, str(store.port).encode())
    time.sleep(10_000)
    sys.exit()


def _fork_worker(job: Job, rank: int, port: int) -> int:
    """Start a worker that does nothing but beat and be watched."""
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "RANK": str(rank),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "GROUP_RANK": str(rank // 8),
    }
    heartbeat = Heartbeat()
    heartbeat.enter("starting")
    Supervisor(job, heartbeat).watch(_tell)
    for number in count():
        time.sleep(BEAT_S)
        heartbeat.begin(Forward(0, Unit(number)))
    sys.exit()


def _tell(error: PlannerError | None) -> NoReturn:
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    os._exit(1)


def _exchanges(store: PrefixStore, workers: int) -> int:
    """Return how many exchanges all workers have had."""
    texts = store.multi_get([f"page/{rank}" for rank in range(workers)])
    return sum(int(json.loads(text)["sequence"]) for text in texts)


def _spent(*pids: int) -> Mapping[int, float]:
    """Return each process' seconds on a core."""
    fields = {pid: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids}
    return {pid: (int(field[11]) + int(field[12])) / _TICKS for pid, field in fields.items()}


if __name__ == "__main__":
    main()
