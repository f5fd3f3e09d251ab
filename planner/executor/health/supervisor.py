"""One worker's side of a run's supervision: it says that it joined, that it failed and why, or that it leaves."""

from __future__ import annotations

from planner.executor.health.ending import END_S, end_within
from planner.executor.health.failures import failure_of, leave_failure
from planner.executor.health.heartbeat import Heartbeat
from planner.executor.health.remote_watch import RemoteWatch
from planner.executor.job import Failure, Job


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
