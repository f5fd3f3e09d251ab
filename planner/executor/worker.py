"""Start a job's workers, and train as one of them."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planner.errors import PlannerError
from planner.formats.files import replace, save_record
from planner.schedule.own_file import load_schedules
from planner.terminal import PrintableFormatter, ProgressLine, printable
from planner.workers.job import TIMELINE_FILE, Job, TrainResult

if TYPE_CHECKING:
    from planner.executor.observe.progress import Progress
    from planner.formats.timeline import Timeline

    TimelineCallback = Callable[[Timeline], None]

_STARTED = "planner.executor.start"  # the module of a worker's process, which imports this one
_SHOWN_EVERY_S = 0.2
# What fully_shard frees and takes again comes to lie in pieces: to keep larger blocks, too, took
# twice the memory.
_APART_BYTES = 2**22


def launch(
    job: Job, on_timeline: TimelineCallback | None = None, model: bytes | None = None
) -> TrainResult:
    """Run `job` on this host, one process per worker, to which `model` is handed.

    Raise PlannerError with why the first worker failed; all others have ended by then.
    """
    from planner.workers.launch import run_workers

    return run_workers(_STARTED, replace(job, run=uuid.uuid4().hex), on_timeline, model)


def work(job_path: str) -> int:
    """Run one of the workers that `launch` starts; return its exit code."""
    job = read_job(Path(job_path))
    assert job.folder is not None
    folder = Path(job.folder)

    def keep(timeline: Timeline) -> None:
        try:
            save_record(timeline, folder / TIMELINE_FILE)
        except PlannerError as cause:
            hint = "TMPDIR chooses another folder for temporary files"
            raise PlannerError(f"there is no trace: {cause.message}", hint=hint) from None

    code, _ = run_worker(job, keep)
    return code


def read_job(path: Path) -> Job:
    """Read what the launching process wrote, with the schedule that its plan is under."""
    text = path.read_text(encoding="utf-8")
    for file in json.loads(text)["schedule_files"]:
        load_schedules(file)
    return Job.model_validate_json(text)


def run_worker(
    job: Job, on_timeline: TimelineCallback, tell: Callable[[PlannerError], None] | None = None
) -> tuple[int, TrainResult | None]:
    """Train as one worker; return the exit code, and the result on rank 0.

    A failure is left to the launcher; under torchrun it is raised, or that of another worker told,
    which ends this one.
    """
    from planner.executor.checkpoint.host_memory import note_fault
    from planner.profiler.this_machine import keep_freed_pages
    from planner.workers.ending import die_with_parent, end_process
    from planner.workers.heartbeat import Heartbeat
    from planner.workers.interfaces import VARIABLES, address_of
    from planner.workers.supervisor import Supervisor

    die_with_parent()
    keep_freed_pages(_APART_BYTES if job.plan.stages[0].shards_gradients else None)
    # torchrun, unlike our launcher, does not set this up
    if (interface := job.run_options.interface) is not None:
        address_of(interface)  # or an error that lists the host's
        os.environ.update(dict.fromkeys(VARIABLES, interface))

    # Warnings of the library have lines of their own.
    over_progress = "\r\x1b[K" if job.show_progress else ""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"{over_progress}warning: %(message)s"))
    logger = logging.getLogger("planner")
    logger.addHandler(handler)
    logger.propagate = False
    rank = int(os.environ["RANK"])
    workers = job.plan.workers
    elastic = job.elastic.elastic is not None
    on_progress = ProgressShown() if job.show_progress else None
    heartbeat = Heartbeat()
    supervisor = Supervisor(job, heartbeat, own_process=True)

    def tell_and_end(error: PlannerError | None) -> NoReturn:
        if error is not None and tell is not None:
            sys.stderr.write("\n")  # leave the progress line
            tell(error)
        if error is not None and elastic:
            note_fault(job, error.message)
            if not getattr(error, "again", True):  # torchrun's agent would start the workers again
                os.kill(os.getppid(), signal.SIGTERM)
        end_process(1 if error is None else error.exit_code)

    try:
        if int(os.environ["WORLD_SIZE"]) == workers or elastic:
            supervisor.watch(tell_and_end)
        from planner.executor.checkpoint.recovery import await_end, recover
        from planner.executor.run.train import train_worker

        recovery = recover(job, heartbeat) if elastic else None
        if recovery is not None and rank >= workers:
            await_end(recovery.store)
            supervisor.await_others()
            return 0, None
        result = train_worker(job, on_progress, heartbeat, on_timeline, supervisor, recovery)
        if result is not None and job.folder is not None:
            supervisor.leave_result(result)
        supervisor.await_others()
        return 0, result
    except Exception as error:
        failure = supervisor.fail(error)
        first = supervisor.error()
        if job.folder is not None:
            return failure.exit_code, None
        if elastic:
            tell_and_end(first)
        # The message is printed first, and nothing after it may block: not the interpreter's
        # shutdown either.
        atexit.register(end_process, failure.exit_code)
        if first is not None:
            raise first from first.__cause__
        return failure.exit_code, None
    finally:
        supervisor.stop()
        if on_progress is not None:
            on_progress.line.keep()


class ProgressShown:
    """Shows a run's progress on stderr, a few times a second."""

    def __init__(self) -> None:
        self.line = ProgressLine()
        self._shown_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.evaluation is not None:
            self.line.keep()
            text = (
                f"evaluation after minibatch {progress.evaluation.minibatch}: {progress.evaluation}"
            )
            sys.stderr.write(f"{printable(text)}\n")
            return

        now = time.monotonic()
        if now - self._shown_s < _SHOWN_EVERY_S and progress.minibatch < progress.minibatches:
            return
        self._shown_s = now
        text = f"minibatch {progress.minibatch}/{progress.minibatches}  loss {progress.loss:.4f}"
        if progress.samples_per_s is not None and progress.seconds_left is not None:
            text += (
                f"  {progress.samples_per_s:.1f} samples/s  "
                f"{timedelta(seconds=round(progress.seconds_left))} left"
            )

        self.line.show(text)
