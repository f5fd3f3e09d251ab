"""Start processes of this package, and read what each of them leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from planner.errors import WorkerError

TIMEOUT_S = 120.0
_ENDING_S = 2.0  # for the others to tell why, when one has failed


def run_workers(module: str, folder: Path, task: str, *, workers: int, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Run `python -m module TASK RESULT` once per worker, and return the text of each one's result.

    Args:
        module: that finds its task in one file, and writes its result to another.
        task: the text of the task.
        workers: processes; each finds its rank in the environment, as under torchrun, and no address to meet at.

    Raises:
        WorkerError: when one fails or does not end in time; none is left running.
    """
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "task").write_text(task, encoding="utf-8")
    with ExitStack() as processes:
        started = [
            processes.enter_context(_start(module, place, rank, workers, (place / f"{rank}.log").open("w")))
            for rank in range(workers)
        ]
        for process in started:
            processes.callback(process.kill)
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            if any(process.poll() for process in started):
                deadline = min(deadline, time.monotonic() + _ENDING_S)
            time.sleep(0.05)
    for rank, process in enumerate(started):
        if process.returncode:
            lines = (place / f"{rank}.log").read_text(encoding="utf-8").strip().splitlines()
            late = time.monotonic() >= deadline and process.returncode < 0
            reason = f"it had not ended after {timeout_s:g} s" if late else f"exit code {process.returncode}"
            raise WorkerError(f"process {rank} of {workers} failed: {(lines or [reason])[-1]}")
    return [(place / f"{rank}.result").read_text(encoding="utf-8") for rank in range(workers)]


def _start(module: str, place: Path, rank: int, workers: int, log: object) -> subprocess.Popen[str]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment = defaults | dict(os.environ) | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", module, str(place / "task"), str(place / f"{rank}.result")]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)  # type: ignore[call-overload,no-any-return]
