"""Fork the workers of a launched run from the process that has imported PyTorch already.

All is as in the product but torchrun's agent and the imports of each worker, which take 3 s of a
core each. Tests of starts, signals and ends have both: `tests/workers`, and those of `tests/cli`
that run the command in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from planner.workers.job import LAUNCHER_VARIABLE
from tests.executor.processes import _warm

END_S = 10.0  # from SIGTERM to SIGKILL, as the launcher has it


def start_workers(store: TCPStore, workers: int, command: Sequence[str], folder: str) -> None:
    """Do what `planner.workers.launch.start_workers` does."""
    variables = dict(os.environ) | {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    processes = [
        _warm().Process(
            target=_work,
            args=(
                tuple(command),
                str(Path.cwd()),
                variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            ),
            daemon=True,
        )
        for rank in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        _wait(processes)
    finally:
        _end(processes)

    failures = {
        rank: ProcessFailure(rank, process.pid or 0, process.exitcode, "none")
        for rank, process in enumerate(processes)
        if process.exitcode
    }
    if failures:
        raise ChildFailedError(command[0], failures)


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Wait until one has failed, or all have ended."""
    while running := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in running])
        if any(process.exitcode for process in processes):
            return


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    deadline = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _work(command: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
    os.environ.clear()
    # The process that this one is forked from ends with the tests.
    os.environ.update({**variables, LAUNCHER_VARIABLE: str(os.getppid())})
    tempfile.tempdir = None  # a new process reads it from the environment
    os.chdir(folder)
    sys.path.insert(0, folder)  # as of `python -m`
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    module, *arguments = command
    importlib.import_module(module).main(*arguments)
