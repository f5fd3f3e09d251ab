"""One worker's side of a run's supervision: it says that it joined, that it failed and why, or that it leaves."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from planner.errors import PlannerError
from planner.workers.ending import END_S, bound_exit, end_within
from planner.workers.failures import error_of, failure_of
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Failure, Job
from planner.workers.local_watch import leave_failure
from planner.workers.watch import StoreWatch

_log = logging.getLogger(__name__)


class Supervisor:
    """Leaves the reason of a worker's failure where others look for it: the launcher in a folder, others in the store.

    Args:
        own_process: whether the process is a worker's alone, and so may be ended after a failure.
        script: whether the process runs a user's script with a loop of its own. How long it takes between two steps is
            its own affair, so hangs are not looked for. But a failure must still end all workers: its cause is logged
            before the script sees the error, and the interpreter's shutdown is bounded.

    Attributes:
        failure: why this worker fails; None until it does.
    """

    def __init__(self, job: Job, heartbeat: Heartbeat, *, own_process: bool = False, script: bool = False) -> None:
        self.failure: Failure | None = None
        self._job = job
        self._heartbeat = heartbeat
        self._own_process = own_process
        self._script = script
        self._watch: StoreWatch | None = None  # None where the launcher watches

    def watch(self, end_process: Callable[[PlannerError | None], NoReturn], *, hangs: bool = True) -> None:
        """Watch all workers through torchrun's store from now on, as `StoreWatch` does."""
        self._watch = StoreWatch(self._job, self._heartbeat, end_process, hangs=hangs)

    def enter(self) -> None:
        """Begin to watch the next worker's process; all workers call it once they have joined."""
        if self._script and "TORCHELASTIC_RUN_ID" in os.environ:
            self.watch(_log_and_end, hangs=False)
        if self._watch is not None:
            self._watch.watch_next()

    def fail(self, error: Exception) -> Failure:
        """Leave the reason why this worker ends, unless that was done before; return it.

        Called before anything that may block: after this the worker may be killed at any time.
        """
        if self.failure is None:
            if self._own_process:
                end_within(END_S)
            self.failure = failure_of(self._job, error, self._heartbeat)
            if self._job.folder is not None:
                leave_failure(Path(self._job.folder), self.failure)
            if self._watch is not None:
                self._watch.post(self.failure)
            if self._script:
                bound_exit()
                _log_error(self.error())
        return self.failure

    def error(self) -> PlannerError | None:
        """Return the error to end with after `fail`: that of the worker that failed first.

        None where another worker of this host reports it already.
        """
        assert self.failure is not None
        return error_of(self.failure) if self._watch is None else self._watch.explained(self.failure)

    def leave(self) -> None:
        """Say that this worker ends as it should, before its connections close."""
        if self._watch is not None:
            self._watch.say_goodbye()
        self.stop()

    def stop(self) -> None:
        """Watch no longer, because this worker is about to end."""
        if self._watch is not None:
            self._watch.stop()


def _log_error(error: PlannerError | None) -> None:
    if error is not None:
        _log.error("%s", error.message)


def _log_and_end(error: PlannerError | None) -> NoReturn:
    """End the process from a thread, because its main thread may wait for a worker that is gone."""
    _log_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
