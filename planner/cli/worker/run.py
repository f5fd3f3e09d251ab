"""Run one training process, in the environment that torchrun sets."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planner.cli.flags import as_flags
from planner.cli.output import ProgressLine, print_complaint
from planner.workers.job import LAUNCHER_VARIABLE, Evaluation, Job, TrainResult

if TYPE_CHECKING:
    from planner.errors import PlannerError
    from planner.executor.observe.measure import Progress
    from planner.formats.timeline import Timeline
    from planner.workers.heartbeat import Heartbeat

_PR_SET_PDEATHSIG = 1


def run_worker(job: Job) -> tuple[int, TrainResult | None]:
    """Train; leave a failure to the launcher, or raise it here when torchrun itself launched this process."""
    from planner.workers.failures import GRACE_S, error_of
    from planner.workers.supervisor import Supervisor

    _use_interface(job)
    _show_warnings(job)
    on_progress = _Progress() if job.show_progress else None
    heartbeat = _start_heartbeat(job)
    watch = None
    supervisor = Supervisor(job, heartbeat, own_process=True)
    try:
        if job.failure_folder is None and int(os.environ["WORLD_SIZE"]) == job.plan.workers:
            from planner.workers.watch import RemoteWatch

            watch = RemoteWatch(job, heartbeat, _tell_and_end)
        supervisor = Supervisor(job, heartbeat, watch, own_process=True)
        if job.baseline == "data-parallel":
            from planner.executor.data_parallel import train_data_parallel

            return 0, train_data_parallel(job, on_progress, heartbeat, supervisor)
        from planner.executor.run.train import train_worker

        return 0, train_worker(job, on_progress, heartbeat, _timeline_writer(job), supervisor)
    except Exception as error:
        failure = supervisor.fail(error)
        if job.failure_folder is not None:
            if failure.consequence:
                time.sleep(GRACE_S)  # the launcher ends all workers with the first: let the cause report before
            return failure.exit_code, None
        told = error_of(failure) if watch is None else watch.explained(failure)
        # The message is printed first, and nothing after it may block: not the interpreter's shutdown either.
        atexit.register(end_process, failure.exit_code)
        if told is not None:
            raise told from told.__cause__
        return failure.exit_code, None
    finally:
        if watch is not None:
            watch.stop()
        if on_progress is not None:
            on_progress.line.keep()


def _show_warnings(job: Job) -> None:
    """Print warnings of the library on lines of their own."""
    over_progress = "\r\x1b[K" if job.show_progress else ""
    handler = logging.StreamHandler()
    handler.setFormatter(_Warning(f"{over_progress}warning: %(message)s"))
    logger = logging.getLogger("planner")
    logger.addHandler(handler)
    logger.propagate = False


class _Warning(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return as_flags(super().format(record))


def _use_interface(job: Job) -> None:
    """Listen on the interface that the job names: torchrun, unlike our launcher, does not set this up."""
    interface = job.run_options.interface
    if interface is not None:
        from planner.workers.launch import VARIABLES, address_of

        address_of(interface)  # or an error that lists the host's
        os.environ.update(dict.fromkeys(VARIABLES, interface))


def _timeline_writer(job: Job) -> Callable[[Timeline], None]:
    from planner.report.trace import save_trace

    def write(timeline: Timeline) -> None:
        assert job.run_options.trace is not None
        save_trace(timeline, job.run_options.trace)

    return write


def _start_heartbeat(job: Job) -> Heartbeat:
    """Start to note what this process does; on a signal of the launcher, it also dumps where in its code it is."""
    from planner.workers.failures import beat_path
    from planner.workers.heartbeat import Heartbeat
    from planner.workers.local_watch import DUMP_SIGNAL, dump_path

    rank = int(os.environ["RANK"])
    stages = tuple(index for index, stage in enumerate(job.plan.stages) if rank in stage.ranks)
    if job.failure_folder is None:
        return Heartbeat(stages=stages)
    folder = Path(job.failure_folder)
    # Never closed: the handler writes to it for as long as the process lives.
    faulthandler.register(DUMP_SIGNAL, file=dump_path(folder, rank).open("w"), all_threads=True)
    heartbeat = Heartbeat(beat_path(folder, rank), stages)
    heartbeat.enter("starting")
    return heartbeat


def _tell_and_end(error: PlannerError | None) -> NoReturn:
    if error is not None:
        sys.stderr.write("\n")  # leave the progress line
        print_complaint("error", error.message, error.hint)
    end_process(1 if error is None else error.exit_code)


def end_process(code: int) -> NoReturn:
    """End at once: torch's teardown at interpreter exit now and then never ends when gloo was used."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        from planner.workers.failures import GRACE_S
        from planner.workers.meeting import end_last

        end_last(GRACE_S)
    os._exit(code)


class _Progress:
    """Shows a run's progress, a few times a second."""

    def __init__(self) -> None:
        self.line = ProgressLine()
        self._shown_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.evaluation is not None:
            self.line.keep()
            sys.stderr.write(evaluation_line(progress.evaluation) + "\n")
            return
        now = time.monotonic()
        if now - self._shown_s < 0.2 and progress.minibatch < progress.minibatches:
            return
        self._shown_s = now
        text = f"minibatch {progress.minibatch}/{progress.minibatches}  loss {progress.loss:.4f}"
        if progress.samples_per_s is not None and progress.seconds_left is not None:
            text += f"  {progress.samples_per_s:.1f} samples/s  {_clock(progress.seconds_left)} left"
        self.line.show(text)


def evaluation_line(evaluation: Evaluation) -> str:
    """Return an evaluation's numbers as one line."""
    from planner.report.tables.training import evaluation_numbers

    return f"evaluation after minibatch {evaluation.minibatch}: {evaluation_numbers(evaluation)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def die_with_parent() -> None:
    """End this process when the launcher dies, even by SIGKILL: no worker is left running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)  # it died before we asked to be told
