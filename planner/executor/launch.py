"""Start the workers on this host through torchrun's launcher, and say why one failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from planner.devices.cuda_variables import CUDA_VARIABLES
from planner.errors import WorkerError
from planner.executor.checkpoint.folders import after_failure
from planner.executor.communication import rendezvous
from planner.executor.environment import environment
from planner.executor.health.failures import WorkersFailedError, explain
from planner.executor.health.local_watch import LocalWatch
from planner.executor.job import LAUNCHER_VARIABLE, Job, TrainResult
from planner.formats.files import save_record

SHUTDOWN_S = "10"  # seconds from SIGTERM to SIGKILL, for the workers that are left when one has failed
WORKER_MODULE = "planner.cli.worker"


def launch(job: Job, on_restart: Callable[[str], None] | None = None) -> TrainResult:
    """Run `job` on this host, one process per worker, and restart them after failures if `job` allows it.

    Args:
        on_restart: is told why, before each restart from the last complete checkpoint.

    Returns:
        What the run measured since the last restart, with the losses of the whole run.

    Raises:
        PlannerError: why the first worker failed; all others have ended by then.
    """
    allowed = job.run_options.max_restarts
    reasons: list[str] = []
    job = job.model_copy(update={"run": uuid.uuid4().hex})
    while True:
        try:
            return _run(job).model_copy(update={"restarts": tuple(reasons)})
        except WorkersFailedError as error:  # noqa: PERF203 - a turn of this loop is a whole run
            if len(reasons) == allowed or not error.again:
                raise
            reasons.append(error.message)
            if on_restart is not None:
                on_restart(f"restart {len(reasons)} of {allowed}: {error.message}")
            job = after_failure(job)


def _run(job: Job) -> TrainResult:
    """Start the workers once, as `launch` does.

    Args:
        job: the run; its `result_path` and `failure_folder` are set here.
    """
    interface = job.run_options.interface or os.environ.get("GLOO_SOCKET_IFNAME", rendezvous.LOOPBACK).split(",")[0]
    address = rendezvous.address_of(interface)
    rendezvous.register()
    with tempfile.TemporaryDirectory(prefix="plan-train-") as folder:
        result_path = Path(folder) / "result.json"
        job = job.model_copy(update={"result_path": str(result_path), "failure_folder": folder})
        job_path = Path(folder) / "job.json"
        save_record(job, job_path)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.plan.workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.BACKEND,
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
                elastic_launch(config, sys.executable)("-m", WORKER_MODULE, str(job_path))
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
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SHUTDOWN_S, **CUDA_VARIABLES}
    wanted = {name: value for name, value in defaults.items() if name not in os.environ}
    return {**wanted, **dict.fromkeys(rendezvous.VARIABLES, interface), LAUNCHER_VARIABLE: str(os.getpid())}
