"""Start one pinned process per core, over the loopback or on emulated hosts, and read its
result.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from benchmarks.kept import ROOT
from benchmarks.netns import network
from planner.errors import PlannerError

CORES = (0, 1)


class Place(Protocol):
    """A place for a process: a network namespace, or this machine itself."""

    @property
    def address(self) -> str:
        """Address that the other processes reach."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` there."""

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment variables for a process there."""


class Loopback:
    """This machine."""

    address = "127.0.0.1"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return `arguments` unchanged."""
        return list(arguments)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Our environment with gloo on the loopback interface."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(extra or {})}


class RunError(PlannerError):
    """A measured run failed or hung; the message ends with its last output."""


@contextmanager
def places(name: str) -> Iterator[tuple[Place, ...]]:
    """Yield two places joined by `name`: "loopback", or a link's rate between two namespaces
    ("1gbit").
    """
    if name == "loopback":
        yield (Loopback(), Loopback())
    else:
        with network(len(CORES), name) as hosts:
            yield hosts


def run_workers(
    where: Sequence[Place],
    module: str,
    arguments: Sequence[str],
    timeout_s: float,
    folder: Path = ROOT,
) -> dict[str, Any]:
    """Run `python -m module arguments` under torchrun, one process per place, each pinned to its
    own core; where there are more places, they take turns.

    Return the JSON object that the first process prints on stdout.

    Raises:
        RunError: when a process fails or `timeout_s` is over; none is left running.
    """
    port = str(free_port())
    processes: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for rank, place in enumerate(where):
            core = CORES[rank % len(CORES)]
            command = ["taskset", "-c", str(core), sys.executable, "-m", "torch.distributed.run"]
            command += [
                "--nnodes",
                str(len(where)),
                "--node-rank",
                str(rank),
                "--nproc-per-node",
                "1",
            ]
            command += [
                "--master-addr",
                where[0].address,
                "--master-port",
                port,
                "-m",
                module,
                *arguments,
            ]
            process = subprocess.Popen(
                place.command(command),
                env=place.environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            stack.callback(_end, process)
        try:
            outputs = [process.communicate(timeout=timeout_s) for process in processes]
        except subprocess.TimeoutExpired:
            raise RunError(
                f"{module} {' '.join(arguments)} did not end within {timeout_s:.0f} s"
            ) from None
    for process, (_, messages) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RunError(
                f"{module} {' '.join(arguments)} failed with exit code "
                f"{process.returncode}:\n{messages}"
            )
    return last_object(outputs[0][0])


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object of `text`, on one line or several; libraries may print other text
    before it.
    """
    begin = max(text.rfind("\n{"), 0)
    found: dict[str, Any] = json.loads(text[begin:])
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """Ask torchrun to end, because it then ends its workers; kill it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def free_port() -> int:
    """Return a port that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
