"""Whether a run can go on from the checkpoint that it is told to, found out before any worker starts."""

from __future__ import annotations

import os
from pathlib import Path

from planner.errors import InputError
from planner.executor.checkpoint.index import AUTO, check_fits, complete, load_index, resolve
from planner.executor.job import BaselineName, CheckpointOptions, Job
from planner.executor.observe.run_log import is_of
from planner.formats.plan import Plan

_NO_RUN_ID = "none"  # what torchrun calls every run that it was given no --rdzv-id for


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


def after_torchruns_restart(options: CheckpointOptions) -> CheckpointOptions | None:
    """What workers that torchrun has started again go on from: the newest checkpoint of their own run.

    None where these are its first workers, or wrote no checkpoint: they begin as the first ones did, or are refused for
    the same reason. Worker 0 decides, which has the losses of the run; the others do what it finds.
    """
    folder = Path(options.folder)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0 or options.every is None or not complete(folder):
        return None
    if os.environ["RANK"] == "0" and not is_of(folder, torchruns_run()):
        return None
    return options.model_copy(update={"resume": AUTO})


def torchruns_run() -> str:
    """What all starts of a run have in common and no other run has: torchrun's id, where it was given one.

    Where not, the process of torchrun itself, this one's parent, stands for it.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID)
    if run != _NO_RUN_ID:
        return run
    parent = os.getppid()
    boot, stat = Path("/proc/sys/kernel/random/boot_id"), Path(f"/proc/{parent}/stat")
    if not (boot.exists() and stat.exists()):  # not Linux
        return f"{run} {parent}"
    started = stat.read_text().rpartition(")")[2].split()[19]  # proc_pid_stat(5): starttime, the 22nd field
    return f"{run} {parent} {started} {boot.read_text().strip()}"
