"""What workers write of themselves into the store of their launcher, and who hangs or is gone by
that.

A worker that waits is only a consequence as long as the peer that it waits for has not done its
part. So the cause of a hang is, in this order: a worker that does not respond at all; a worker
whose own work does not end; a link that does not deliver what was sent, when all workers wait. The
streams of a checked plan cannot stop in any other way.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import PlannerError, WorkerError
from planner.formats.files import Record
from planner.workers.ending import ABORT_S, within
from planner.workers.failures import stage_of
from planner.workers.heartbeat import Beat
from planner.workers.job import Failure, Job
from planner.workers.secret_store import ForgedValueError, Part, protected, read_record

CAUSE = "cause"  # under which key stands who failed first
ENDED = "ended"  # under which key stands how many workers have done all their work
Ending = Callable[[PlannerError | None], NoReturn]
FOR_EVER = timedelta(days=365)
MEMORY_HINT = "the system ends processes that exhaust its memory; see the kernel's log"
# A worker that uses more than this share of the time that it had a core to run on makes progress
# while it prepares.
BUSY_SHARE = 0.05
_LEAST_S = 0.1  # below this, what it ran and waited for a core tells nothing


class Page(Record):
    """What a worker writes of itself, again and again."""

    beat: Beat
    sequence: int = 0  # of this writing; 0 before the first
    place: str | None = None  # in its code
    cpu_s: float = 0.0  # processor time of the process
    starved_s: float = 0.0  # its main thread was ready to run, and others had all cores
    ended: bool = False  # all its work is done, and it writes no more


# All workers are started at once, so one that has written nothing yet can hang, too.
_NONE_YET = Page(beat=Beat(beats=0, state="preparing", doing="while starting"))


@dataclass
class _Seen:
    page: Page  # the newest
    before: Page  # when it last moved
    moved_s: float  # that moment
    written_s: float  # when the newest page was new

    def has_moved(self, page: Page, now_s: float) -> bool:
        """Return whether a worker has done anything since the page before: a beat, or computing."""
        beat = page.beat
        old = self.before.beat
        if (beat.beats, beat.device) != (old.beats, old.device):
            return True
        ran_s = page.cpu_s - self.before.cpu_s
        starved_s = page.starved_s - self.before.starved_s
        enough = ran_s + starved_s > _LEAST_S and ran_s > BUSY_SHARE * (
            now_s - self.moved_s - starved_s
        )
        return beat.state == "preparing" and enough


class HangDetector:
    """Decides from the workers' pages whether a job hangs.

    A worker that is in a script's own code may be there for as long as it likes, until another one
    has waited in a call for the time-out, and it has not come back for as long.

    Args:
        timeout_s: how long a worker may do nothing new, in addition to the slowest instruction so
            far. One that has written no page for half of it does not respond.
        started_s: how long this process took to start. One that has written nothing yet may take
            twice as long.
        allows_more: what allows for more time, as a hint says it.
    """

    def __init__(
        self,
        job: Job,
        timeout_s: float,
        started_s: float = 0.0,
        allows_more: str = "`hang_timeout_s=SECONDS`",
    ) -> None:
        self._job = job
        self._timeout_s = timeout_s
        self._allows_more = allows_more
        self._first_s = max(0.0, started_s - timeout_s)
        self._seen: dict[int, _Seen] = {}

    def look(self, pages: Mapping[int, Page], now_s: float) -> Failure | None:
        """Record the pages, by rank, that are there at `now_s`; return the cause once one has not
        moved for long.
        """
        for rank in range(self._job.plan.workers):
            page = pages.get(rank, _NONE_YET)
            if page.ended:
                self._seen.pop(rank, None)
                continue
            seen = self._seen.get(rank)
            if seen is None or seen.has_moved(page, now_s):
                moved_s = now_s + self._first_s * (page is _NONE_YET)
                self._seen[rank] = _Seen(page, page, moved_s, moved_s)
            else:
                if page.sequence != seen.page.sequence:
                    seen.written_s = now_s
                seen.page = page

        if not self._seen:
            return None
        limit_s = self._timeout_s + max(seen.page.beat.slowest_s for seen in self._seen.values())
        # For how long each has not moved although it could have.
        stuck = {
            rank: now_s - seen.moved_s - (seen.page.starved_s - seen.before.starved_s)
            for rank, seen in self._seen.items()
        }
        longest = sorted(stuck, key=lambda rank: -stuck[rank])
        late = [rank for rank in longest if stuck[rank] > limit_s]
        if not any(self._seen[rank].page.beat.state != "elsewhere" for rank in late):
            return None
        # A worker that waits may have stopped up to a step before the cause did, which may not be
        # late yet. So it is looked for among all that have not moved for half the time: first one
        # that does not respond, then one whose own work does not end, which must be late itself.
        still = [rank for rank in longest if stuck[rank] > limit_s / 2]
        for rank in still:
            seen = self._seen[rank]
            if now_s - seen.written_s > self._timeout_s / 2:
                why = "it does not respond: it is stopped, or its host or its link is down"
                return self._failure(rank, f"{self._found(rank, stuck[rank])}: {why}")

        for rank in still:
            page = self._seen[rank].page
            # A host that is ahead waits for its device in any call: what the device is at is what
            # the worker is at.
            if (page.beat.device or page.beat).state != "waiting":
                at = f", at {page.place}" if page.place else ""
                if rank not in late:
                    return None
                return self._failure(rank, self._found(rank, stuck[rank]) + at)

        if len(late) < len(self._seen):
            return None
        # All wait, the first one for what another one has sent: the streams of a checked plan
        # cannot stop otherwise.
        waited = f"has waited for {stuck[late[0]]:.0f} s {self._seen[late[0]].page.beat.doing}"
        waited = waited.replace(" s waiting for", " s for")
        return self._failure(
            late[0], f"{waited}, and all others wait too: a link carries nothing, or lost a message"
        )

    def _found(self, rank: int, stuck_s: float) -> str:
        beat = self._seen[rank].page.beat
        device = ""
        if beat.device is not None:
            device = f", its device {beat.device.doing}"
        return f"has not moved for {stuck_s:.0f} s, {beat.doing}{device}"

    def _failure(self, rank: int, message: str) -> Failure:
        return Failure(
            rank=rank,
            stage=stage_of(self._job, rank, self._seen[rank].page.beat),
            message=message,
            hint=f"look there for what may block; allow more time with {self._allows_more}",
            exit_code=WorkerError.exit_code,
            consequence=False,
        )


def age_s() -> float:
    """Return for how long this process has run; 0 where the system does not tell."""
    with suppress(OSError):
        # proc_pid_stat(5): starttime
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def own_keys(store: Store) -> Store:
    """Return the part of a store that the workers of this start have for themselves."""
    return Part(f"plan/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", protected(store))


def failure_key(rank: int) -> str:
    """Return under which of these keys a worker reports its failure."""
    return f"failure/{rank}"


def cause_in(store: Store) -> Failure | None:
    """Return the failure that the run ends with, if one was reported."""
    rank = store.compare_set(CAUSE, "", "")  # empty where it is missing, without a wait
    if not rank:
        return None
    if not rank.isdigit():
        raise ForgedValueError(CAUSE)
    return read_record(store, failure_key(int(rank)), Failure)


def last_beat(store: Store, rank: int) -> Beat | None:
    """Return what a worker was last heard of; None if it has written nothing."""
    page = f"page/{rank}"
    if not store.check([page]):
        return None
    return read_record(store, page, Page).beat


class NextWorker:
    """Watches the process of the next worker, the first one's for the last, until that worker says
    goodbye.

    All workers make one, once they have joined. `on_gone` is told in a thread whose process is
    gone.
    """

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        rank = dist.get_rank()
        self._workers = dist.get_world_size()
        self._next = (rank + 1) % self._workers
        self._previous = (rank - 1) % self._workers
        self._on_gone = on_gone
        self._left = False
        # gloo, whose connections break with the process, and of its own: when an operation on a
        # group runs out of time, gloo closes all the group's connections.
        self._group = dist.new_group(backend="gloo", timeout=FOR_EVER)
        self._thread = threading.Thread(target=self._wait, name="next worker", daemon=True)
        if self._workers > 1:
            self._thread.start()

    def say_goodbye(self) -> None:
        """Tell the previous worker that this one ends as it should, and wait until the next one
        has.
        """
        self._left = True
        if self._workers > 1:
            within(ABORT_S, lambda: dist.send(torch.zeros(1), self._previous, self._group))
            # Until the next one has said goodbye, too: an interpreter that ends while a thread is
            # in a library's call aborts the process.
            self._thread.join(ABORT_S)

    def leave(self) -> None:
        """Count the next worker's end as one that should be."""
        self._left = True

    def _wait(self) -> None:
        with suppress(RuntimeError):
            dist.recv(torch.zeros(1), self._next, self._group)
            self._left = True
        if not self._left:
            self._on_gone(self._next)
