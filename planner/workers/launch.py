"""Start the workers on this host through torchrun's launcher, and say why one failed.

torchrun's own rendezvous opens a store that listens on all addresses of the host. Its launcher accepts other handlers,
and torch's store accepts a socket that is already bound: here it listens on one address only.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported by a star import
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from planner.errors import WorkerError
from planner.formats.files import save_record
from planner.formats.timeline import Timeline, load_timeline
from planner.workers.interfaces import LOOPBACK, VARIABLES, address_of
from planner.workers.job import LAUNCHER_VARIABLE, RESULT_FILE, TIMELINE_FILE, Job, TrainResult
from planner.workers.local_watch import LocalWatch, explain
from planner.workers.place import GPU_VARIABLES

BACKEND = "plan-one-host"
_TIMEOUT = timedelta(minutes=5)
SHUTDOWN_S = "10"  # seconds from SIGTERM to SIGKILL, for the workers that are left when one has failed


class OneHost(RendezvousHandler):
    """Rendezvous of a single launcher, which holds the store that its workers use."""

    def __init__(self, address: str, run_id: str) -> None:
        self._run_id = run_id
        self._address = address
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store; nobody is waited for, because the caller is the only member."""
        listening = socket.create_server((self._address, 0))
        port = listening.getsockname()[1]
        # Detached, because the store closes the socket.
        descriptor = listening.detach()
        # Without libuv: with it, the store of PyTorch 2.7 takes no socket that listens already.
        self._store = TCPStore(
            self._address, port, is_master=True, timeout=_TIMEOUT, master_listen_fd=descriptor, use_libuv=False
        )
        bootstrap = RendezvousStoreInfo(self._address, port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, bootstrap)

    @property
    def use_agent_store(self) -> bool:
        """Let the workers use the launcher's store instead of opening one."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        """Close the port."""
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneHost(parameters.endpoint, parameters.run_id)


def register() -> None:
    """Register `BACKEND` with torch's launcher."""
    # Not a lambda: a launcher that restarts its workers registers again, and torch accepts only the same function.
    rendezvous_handler_registry.register(BACKEND, _create)


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
    register()
    with tempfile.TemporaryDirectory(prefix="plan-train-") as folder:
        job = job.model_copy(update={"folder": folder})
        job_path, result_path = Path(folder) / "job.json", Path(folder) / RESULT_FILE
        save_record(job, job_path)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.plan.workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend=BACKEND,
            rdzv_endpoint=address,
            local_addr=address,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            max_restarts=0,
            monitor_interval=0.1,
        )
        with _quiet_launcher(), environment(_worker_variables(interface)):
            watch = LocalWatch(Path(folder), job)
            watch.start()
            try:
                elastic_launch(config, sys.executable)("-m", module, str(job_path))
            except ChildFailedError as cause:
                exit_codes = {rank: process.exitcode for rank, process in cause.failures.items()}
                error = explain(exit_codes, Path(folder), job)
                raise error from error.__cause__
            except SignalException as cause:
                # The launcher has ended the workers. Ctrl-C then ends this process as it would any other.
                if cause.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise WorkerError(f"training was ended by {cause.sigval.name}") from None
            finally:
                watch.stop()
        if not result_path.exists():
            raise WorkerError("the workers ended without an error and without a result")
        if on_timeline is not None and (timeline_path := Path(folder) / TIMELINE_FILE).exists():
            on_timeline(load_timeline(timeline_path))
        return TrainResult.model_validate_json(result_path.read_text(encoding="utf-8"))


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence torchrun's log: `launch` says in one sentence what happened."""
    # Some of its loggers have a level of their own, which their parent's does not override.
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger)
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _worker_variables(interface: str) -> dict[str, str]:
    """Return what the workers inherit: one network interface, and one thread unless the environment says otherwise."""
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SHUTDOWN_S, **GPU_VARIABLES}
    wanted = {name: value for name, value in defaults.items() if name not in os.environ}
    return {**wanted, **dict.fromkeys(VARIABLES, interface), LAUNCHER_VARIABLE: str(os.getpid())}
