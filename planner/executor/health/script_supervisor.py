"""Supervision of a user's script with a custom loop: its process is not ours, but a failure must still end all of them.

How long a script takes between two steps is its own affair, so hangs are not looked for.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from planner.errors import PlannerError
from planner.executor.health.ending import bound_exit
from planner.executor.health.failures import error_of
from planner.executor.health.remote_watch import RemoteWatch
from planner.executor.health.supervisor import Supervisor
from planner.executor.job import Failure

_log = logging.getLogger(__name__)


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
