"""Which checkpoint and seed a run, or a restart of it, resumes with: decided before any worker starts."""

from __future__ import annotations

import os
from pathlib import Path

from planner.errors import InputError
from planner.executor.checkpoint.folders import AUTO, complete, resolve
from planner.executor.checkpoint.index import load_checkpoint
from planner.executor.job import BaselineName, CheckpointOptions, Job
from planner.executor.observe.run_log import is_of
from planner.formats.plan import Plan

_NO_RUN_ID = "none"  # torchrun's id of every run that was started without --rdzv-id


def seed_of_run(
    options: CheckpointOptions, plan: Plan, seed: int | None = None, baseline: BaselineName | None = None
) -> int:
    """Return the seed of a run with `plan`: that of the checkpoint it resumes from, or `seed`, or 0.

    Raises:
        InputError: when there is no such checkpoint, or it is of another model or seed.
    """
    if options.every is None and options.resume is None:
        return seed or 0
    if baseline is not None:
        raise InputError(
            f"checkpoints are of plans, and `baseline={baseline}` trains without one",
            hint="leave out `every` and `resume`",
        )
    path = resolve(options.resume, Path(options.folder), writes=options.every is not None)
    if path is None:
        return seed or 0
    saved = load_checkpoint(path)
    saved.check_fits(plan, seed)
    return saved.index.seed


def after_failure(job: Job) -> Job:
    """Return the job to start after `job` failed: it resumes from its own newest checkpoint, or begins as before."""
    options = _resuming(job.checkpoints)
    return job if options is None else job.model_copy(update={"checkpoints": options, "started_again": True})


def after_torchrun_restart(options: CheckpointOptions) -> CheckpointOptions | None:
    """Return the options of workers that torchrun restarted: resume from the newest checkpoint of their own run.

    None for the first workers of a run, and for a run without a checkpoint: those begin as the first ones did, or are
    refused for the same reason. Worker 0 decides, because it has the run's losses; the others follow what it finds.
    """
    resuming = _resuming(options)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0 or resuming is None:
        return None
    if os.environ["RANK"] == "0" and not is_of(Path(options.folder), torchrun_run_id()):
        return None
    return resuming


def _resuming(options: CheckpointOptions) -> CheckpointOptions | None:
    """Return `options` that resume from the newest checkpoint in the run's folder; None if it has or writes none."""
    if options.every is None or not complete(Path(options.folder)):
        return None
    return options.model_copy(update={"resume": AUTO})


def torchrun_run_id() -> str:
    """Return an id that all starts of a run share and no other run has: torchrun's id, where it was given one.

    Otherwise the process of torchrun, this one's parent, identifies the run.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID)
    if run != _NO_RUN_ID:
        return run
    parent = os.getppid()
    boot, stat = Path("/proc/sys/kernel/random/boot_id"), Path(f"/proc/{parent}/stat")
    if not (boot.exists() and stat.exists()):  # not Linux
        return f"{run} {parent}"
    # Process ids are used again, so its start and the boot of the machine are part of the id.
    started = stat.read_text().rpartition(")")[2].split()[19]  # proc_pid_stat(5): starttime, the 22nd field
    return f"{run} {parent} {started} {boot.read_text().strip()}"
