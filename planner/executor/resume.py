"""Whether a run can go on from the checkpoint that it is told to, found out before any worker starts."""

from __future__ import annotations

from pathlib import Path

from planner.errors import InputError
from planner.executor.checkpoint_index import AUTO, check_fits, complete, load_index, resolve
from planner.executor.job import BaselineName, CheckpointOptions, Job
from planner.plan_file import Plan


def seed_of_run(
    options: CheckpointOptions, plan: Plan, seed: int | None = None, baseline: BaselineName | None = None
) -> int:
    """The seed of a run with `plan`: that of the checkpoint it goes on from, or `seed`, or 0.

    Raises:
        InputError: when there is no such checkpoint, or it is of another model or seed.
    """
    if options.every is None and options.resume is None:
        return seed or 0
    if baseline is not None:
        raise InputError(
            f"checkpoints are of plans, and --baseline {baseline} trains without one",
            hint="leave out --checkpoint-every and --resume",
        )
    path = resolve(options.resume, Path(options.folder), writes=options.every is not None)
    if path is None:
        return seed or 0
    index = load_index(path)
    check_fits(index, path, plan, seed)
    return index.seed


def after_failure(job: Job) -> Job:
    """What to run when `job` has failed: it goes on from its own newest checkpoint, or begins as it did."""
    options = job.checkpoints
    if options.every is None or not complete(Path(options.folder)):
        return job
    options = options.model_copy(update={"resume": AUTO})
    return job.model_copy(update={"checkpoints": options, "started_again": True})
