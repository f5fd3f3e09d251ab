"""Start the workers of a job, and start them again after a failure."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from planner.executor.checkpoint.folders import after_failure
from planner.workers.failures import WorkersFailedError
from planner.workers.job import Job, TrainResult
from planner.workers.launch import run_workers

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
            return run_workers(WORKER_MODULE, job).model_copy(update={"restarts": tuple(reasons)})
        except WorkersFailedError as error:  # noqa: PERF203 - a turn of this loop is a whole run
            if len(reasons) == allowed or not error.again:
                raise
            reasons.append(error.message)
            if on_restart is not None:
                on_restart(f"restart {len(reasons)} of {allowed}: {error.message}")
            job = after_failure(job)
