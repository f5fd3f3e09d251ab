"""Start the workers on this host as torchrun does, and say why one failed.

torchrun opens a store that listens on all addresses of the host. torch's store accepts a socket that is already bound:
here it listens on one address only.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import InputError, WorkerError
from planner.formats.files import save_record
from planner.formats.timeline import Timeline, load_timeline
from planner.workers.job import LAUNCHER_VARIABLE, RESULT_FILE, TIMELINE_FILE, Job, TrainResult
from planner.workers.local_watch import LocalWatch, explain
from planner.workers.place import CUDA_VARIABLES

LOOPBACK = "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # by which torch's backends choose an interface
_TIMEOUT = timedelta(minutes=5)
_LOOK_S = 0.1  # between two looks at the processes
_SHUTDOWN_S = 10.0  # from SIGTERM to SIGKILL, for the workers that are left when one has failed
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: get an interface's IPv4 address


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        InputError: when there is no such interface, or it has no IPv4 address.
    """
    if interface == LOOPBACK:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise InputError(
                f"'{interface}' is no network interface with an IPv4 address here", hint=f"interfaces here: {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within this context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_workers(module: str, job: Job, on_timeline: Callable[[Timeline], None] | None = None) -> TrainResult:
    """Start the workers of `job` on this host, one process each, and wait for their end.

    Args:
        module: what each process runs, with the path of the job as its argument.
        job: the run; its `folder` is set here.
        on_timeline: is given what all workers did, if the job asks for a trace.

    Raises:
        WorkersFailedError: why the first worker failed; all others have ended by then.
    """
    interface = job.run_options.interface or os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK).split(",")[0]
    address = address_of(interface)
    with tempfile.TemporaryDirectory(prefix="plan-train-") as name, socket.create_server((address, 0)) as listening:
        folder, port, workers = Path(name), listening.getsockname()[1], str(job.plan.workers)
        job = job.model_copy(update={"folder": name})
        save_record(job, folder / "job.json")
        # Detached, because the store closes the socket, when it is freed. Without libuv: with it, the store of PyTorch
        # 2.7 takes no socket that listens already.
        store = TCPStore(
            address, port, is_master=True, timeout=_TIMEOUT, master_listen_fd=listening.detach(), use_libuv=False
        )
        defaults = {"OMP_NUM_THREADS": "1", **CUDA_VARIABLES}
        variables = {
            **{name: value for name, value in defaults.items() if name not in os.environ},
            **dict.fromkeys(VARIABLES, interface),
            LAUNCHER_VARIABLE: str(os.getpid()),
            # Those of torchrun that workers read.
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": workers,
            "LOCAL_WORLD_SIZE": workers,
            "GROUP_RANK": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "-m", module, str(folder / "job.json")]
        try:
            with _told_of_signals():
                failed = _run(command, variables, job.plan.workers, LocalWatch(folder, job))
        finally:
            del store  # which lives as long as the workers
        if failed:
            error = explain(failed, folder, job)
            raise error from error.__cause__
        if not (result_path := folder / RESULT_FILE).exists():
            raise WorkerError("the workers ended without an error and without a result")
        if on_timeline is not None and (timeline_path := folder / TIMELINE_FILE).exists():
            on_timeline(load_timeline(timeline_path))
        return TrainResult.model_validate_json(result_path.read_text(encoding="utf-8"))


@contextmanager
def _told_of_signals() -> Iterator[None]:
    """Let the signals that end this process end the workers first; Ctrl-C does so by itself."""

    def end(number: int, _: object) -> NoReturn:
        raise WorkerError(f"training was ended by {signal.Signals(number).name}")

    main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP) if main}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _run(command: Sequence[str], variables: Mapping[str, str], workers: int, watch: LocalWatch) -> dict[int, int]:
    """Run `command` once per worker, until all have ended or one has failed; then end the others.

    Returns:
        The exit codes of the workers that failed, by rank; negative for a signal.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(workers):
            own = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A session of its own, so that what a worker starts ends with it, and Ctrl-C is the launcher's affair.
            processes.append(subprocess.Popen(command, env=own, start_new_session=True))
        while True:
            codes = [process.poll() for process in processes]
            failed = {rank: code for rank, code in enumerate(codes) if code}
            if failed or None not in codes:
                return failed
            watch.look([process.pid for process in processes])
            time.sleep(_LOOK_S)
    finally:
        left = [process for process in processes if process.poll() is None]
        for process in left:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _SHUTDOWN_S
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in left:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
                process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
