"""One worker's side of a run's supervision: it says that it joined, that it failed and why, or that it leaves.

Supervision of a user's script with a custom loop: its process is not ours, but a failure must still end all of them.

How long a script takes between two steps is its own affair, so hangs are not looked for.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from planner.errors import PlannerError
from planner.workers.ending import END_S, bound_exit, end_within
from planner.workers.failures import error_of, failure_of, leave_failure
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Failure, Job
from planner.workers.watch import RemoteWatch

_log = logging.getLogger(__name__)


class Supervisor:
    """Leaves the reason of a failure where others look for it: the launcher in a folder, other hosts in the store.

    Args:
        watch: over the other hosts' workers; None where the launcher watches.
        own_process: whether the process ends with a failure, and so may be ended.

    Attributes:
        failure: why this worker fails; None until it does.
    """

    def __init__(
        self, job: Job, heartbeat: Heartbeat, watch: RemoteWatch | None = None, *, own_process: bool = False
    ) -> None:
        self.failure: Failure | None = None
        self._job = job
        self._heartbeat = heartbeat
        self._watch = watch
        self._own_process = own_process

    def enter(self) -> None:
        """Begin to watch the others; all workers call it once they have joined."""
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
            leave_failure(self._job, self.failure)
            if self._watch is not None:
                self._watch.post(self.failure)
        return self.failure

    def leave(self) -> None:
        """Say that this worker ends as it should, before its connections close."""
        if self._watch is not None:
            self._watch.say_goodbye()
            self._watch.stop()


class ScriptSupervisor(Supervisor):
    """Logs the cause of a failure before the script sees the error, and bounds the interpreter's shutdown after it."""

    def enter(self) -> None:
        """Begin to watch the others, through torchrun's store."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._watch = RemoteWatch(self._job, self._heartbeat, _log_and_end, hangs=False)
        super().enter()

    def fail(self, error: Exception) -> Failure:
        """Leave the reason why this worker ends, and log it, or that of another worker of which it is a consequence."""
        if self.failure is None:
            failure = super().fail(error)
            bound_exit()
            told = error_of(failure) if self._watch is None else self._watch.explained(failure)
            if told is not None:
                _log.error("%s", told.message)
        assert self.failure is not None
        return self.failure


def _log_and_end(error: PlannerError | None) -> NoReturn:
    """End the process from a thread, because its main thread may wait for a worker that is gone."""
    if error is not None:
        _log.error("%s", error.message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
