"""Starting the workers on this host through torchrun's own launcher, and saying why one failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from planner.errors import InputError, PlannerError, WorkerError
from planner.executor.job import Failure, Job, TrainResult
from planner.executor.links import ConnectionLostError
from planner.files import save_record

LOOPBACK = "lo"
GRACE_S = 3.0  # how long a worker that lost its peer waits before it ends, so that the launcher sees the peer first
SHUTDOWN_S = "10"  # seconds, from SIGTERM to SIGKILL for the workers left when one has failed


WORKER_MODULE = "planner.cli.worker"


def launch(job: Job) -> TrainResult:
    """Run `job` on this host, one process per worker.

    Args:
        job: the run; its `result_path` and `failure_folder` are set here.

    Returns:
        What rank 0 measured.

    Raises:
        PlannerError: why the first worker failed; all others have ended by then.
    """
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
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            max_restarts=0,
            monitor_interval=0.1,
        )
        with _quiet_launcher(), _environment():
            try:
                elastic_launch(config, sys.executable)("-m", WORKER_MODULE, str(job_path))
            except ChildFailedError as cause:
                raise _explain(cause.failures, Path(folder), job) from None
            except SignalException as cause:
                # The launcher has ended the workers; Ctrl-C ends this process as it would any other.
                if cause.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise WorkerError(f"training was ended by {cause.sigval.name}") from None
        if not result_path.exists():
            raise WorkerError("the workers ended without an error and without a result")
        return TrainResult.model_validate_json(result_path.read_text(encoding="utf-8"))


def leave_failure(job: Job, error: BaseException) -> int:
    """Called by a worker that failed: leave the reason where the launcher finds it.

    Returns:
        The exit code to end with.
    """
    rank = int(os.environ.get("RANK", "0"))
    stage = next((index for index, stage in enumerate(job.plan.stages) if rank in stage.ranks), None)
    known = error if isinstance(error, PlannerError) else None
    failure = Failure(
        rank=rank,
        stage=stage,
        message=known.message if known else f"{type(error).__name__}: {error} ({_place(error)})",
        hint=known.hint if known else "",
        exit_code=known.exit_code if known else WorkerError.exit_code,
        consequence=isinstance(error, ConnectionLostError) or _is_connection_loss(error),
    )
    if job.failure_folder is not None:
        save_record(failure, Path(job.failure_folder) / f"failure-{rank}.json")
    if failure.consequence:
        time.sleep(GRACE_S)
    return failure.exit_code


def _explain(failures: dict[int, ProcessFailure], folder: Path, job: Job) -> PlannerError:
    """The first cause among everything that failed; the launcher itself ended the rest with SIGTERM."""
    left = [Failure.model_validate_json(path.read_text("utf-8")) for path in sorted(folder.glob("failure-*.json"))]
    for failure in left:
        if not failure.consequence:
            return _error_of(failure)
    for rank, process in sorted(failures.items()):
        if process.exitcode < 0 and process.exitcode != -signal.SIGTERM:
            stage = next(index for index, stage in enumerate(job.plan.stages) if rank in stage.ranks)
            name = signal.Signals(-process.exitcode).name
            hint = (
                "the system ends processes that exhaust its memory; see the kernel's log" if name == "SIGKILL" else ""
            )
            return WorkerError(f"worker {rank} (stage {stage}) was killed by {name} during training", hint=hint)
    if left:
        return _error_of(left[0])
    rank, process = min(failures.items())
    return WorkerError(f"worker {rank} ended with exit code {process.exitcode} and left no reason")


def _error_of(failure: Failure) -> PlannerError:
    where = f"worker {failure.rank}" + (f" (stage {failure.stage})" if failure.stage is not None else "")
    # A mistake in the input is every worker's; only what happened to one is told with its name.
    message = failure.message if failure.exit_code == InputError.exit_code else f"{where}: {failure.message}"
    error = PlannerError(message, hint=failure.hint)
    error.exit_code = failure.exit_code
    return error


def _is_connection_loss(error: BaseException) -> bool:
    """Whether torch.distributed lost a peer: it has no type of its own for that on gloo."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "Socket"))
    )


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the launcher's own log lines off the screen: `launch` says what happened in one sentence."""
    # Some of them have a level of their own, so their common parent's does not reach them.
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


@contextmanager
def _environment() -> Iterator[None]:
    """Environment of the workers, inherited from this process: loopback on one host, one thread unless asked."""
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SHUTDOWN_S}
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
