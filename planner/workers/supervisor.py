"""Watch over a run from within its workers: each says through a store what it does and why it
fails.

A thread of each worker writes the worker's page to the store of its launcher every second or two,
over a connection of its own, because the training's may hang. The first and the last worker read
the pages of all and judge them; two, because one of them may be what hangs. A worker that reads the
cause of a failure ends from that thread, and each host reports it once: under NCCL the main thread
waits in calls of CUDA that nothing can interrupt.

Pages would tell only after a time-out that a process is gone. Where no launcher of ours sees all
processes, each worker also watches the next one's.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

# PyTorch exports both by a star import.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from planner.errors import PlannerError, WorkerError, first_line
from planner.formats.files import replace
from planner.terminal import printable
from planner.workers.ending import (
    ABORT_S,
    END_S,
    GRACE_S,
    bound_exit,
    end_process,
    end_within,
    within,
)
from planner.workers.failures import (
    TRACEBACK_HINT,
    error_of,
    failure_of,
    innermost,
    stage_of,
    worker_name,
)
from planner.workers.heartbeat import Beat, Heartbeat
from planner.workers.job import Failure, Job, TrainResult
from planner.workers.result import leave_result
from planner.workers.secret_store import record_in
from planner.workers.stacks import stacks_of_others
from planner.workers.watch import (
    CAUSE,
    ENDED,
    MEMORY_HINT,
    Ending,
    HangDetector,
    NextWorker,
    Page,
    age_s,
    cause_in,
    failure_key,
    last_beat,
    own_keys,
)

_CONNECT_S = 20.0  # to a store that is there before any worker
_FIRST_ENDS_S = ABORT_S + 1.0  # for a worker that failed to abort its groups and end
_FOR_SCRIPTS = "planner.pipeline(..., hang_timeout_s=SECONDS)"  # what allows for more time there
# of the time-out without a beat, after which the page has the place in the code
_OVERDUE_SHARE = 0.5
_ASKED_EVERY_S = 0.05  # whether all workers have ended
_LAST_WORDS_S = 1.0  # until the report of a worker that failed can be read in the store
_log = logging.getLogger(__name__)


class Supervisor:
    """Tells the others what this worker does and why it fails, and ends it when another one has
    failed.

    Args:
        own_process: whether the process is a worker's alone, and so may be ended after a failure.
        script: whether it runs a user's loop. A failure must end all workers there, too: its cause
            is logged before the script sees the error, and the interpreter's shutdown is bounded.
    """

    def __init__(
        self, job: Job, heartbeat: Heartbeat, *, own_process: bool = False, script: bool = False
    ) -> None:
        self._job = job
        self._heartbeat = heartbeat
        self._own_process = own_process
        self._script = script
        self._rank = int(os.environ.get("RANK", "0"))
        self._timeout_s = job.run_options.hang_timeout_s
        # At least ten exchanges within a time-out: a worker counts as silent after half of it.
        self._interval_s = min(2.0, self._timeout_s / 10)
        self._detector: HangDetector | None = None  # of a worker that judges
        self._known = [self._rank]  # ranks that have written a page
        self._stopped = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends this worker
        self._newest_beat: tuple[int, Beat | None] | None = None
        self._moved_s = 0.0  # when that was new
        self._thread = threading.Thread(target=self._exchange, name="hang watch", daemon=True)
        self._next: NextWorker | None = None
        self._failure: Failure | None = None
        self._ended = False  # all work of this worker is done
        self._store: Store | None = None  # None where nobody watches

    def watch(self, end_process: Ending) -> None:
        """Watch all workers from now on.

        Args:
            end_process: reports the error, if there is one, and ends the process from a thread.
        """
        self._end_process = end_process
        # The last one of all that were started: a plan of one worker may leave others idle.
        if self._rank in (0, int(os.environ.get("WORLD_SIZE", self._job.plan.workers)) - 1):
            allows_more = "`hang_timeout_s=SECONDS`"
            if self._script:
                allows_more = _FOR_SCRIPTS
            self._detector = HangDetector(self._job, self._timeout_s, age_s(), allows_more)

        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=_CONNECT_S)
        connect = partial(
            TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        reached = within(_CONNECT_S, connect)
        if not reached:
            raise self._lost(f"not reached in {_CONNECT_S:.0f} s")
        self._store = own_keys(reached[0])
        self._thread.start()

    @property
    def watches(self) -> bool:
        """Whether a worker that hangs will be noticed."""
        return self._store is not None

    def enter(self) -> None:
        """Begin to watch the next worker's process; all workers call it once they have joined."""
        # or the script has met the others by means of its own
        if self._script and "MASTER_PORT" in os.environ:
            self.watch(_log_and_end)
        # or else the launcher sees every process
        if self._store is not None and self._job.folder is None:
            self._next = NextWorker(partial(self._gone, self._store))

    def fail(self, error: Exception) -> Failure:
        """Leave the reason why this worker ends, once, before anything that may block;
        return it.
        """
        if self._failure is None:
            if self._own_process:
                end_within(END_S)
            failure = failure_of(self._job, error, self._heartbeat)
            if self._script and failure.hint == TRACEBACK_HINT:  # a script shows it anyway
                failure = replace(failure, hint="")
            self._failure = failure
            if (store := self._store) is not None:
                self._ending.acquire()  # waits for ever where another thread is ending this process
                self._stopped.set()
                # bounded: the store's host may be what failed
                within(GRACE_S, lambda: _post(store, failure))
            if self._script:
                bound_exit()
                if (told := self.error()) is not None:
                    _log.error("%s", printable(told.message))

        return self._failure

    def error(self) -> PlannerError | None:
        """Return the error of the worker that failed first, to end with; None where this host has
        told it already.
        """
        failure = self._failure
        store = self._store
        assert failure is not None
        if store is None:
            return error_of(failure)

        def agree() -> tuple[Failure, bool]:
            cause = None if failure.consequence else failure
            deadline = time.monotonic() + GRACE_S
            while cause is None and time.monotonic() < deadline:
                time.sleep(0.1)
                cause = cause_in(store)
            return cause or failure, _is_first_here(store)

        # torchrun, which holds the store, may be gone as well.
        agreed = within(2 * GRACE_S, agree)
        cause, tells = agreed[0] if agreed else (failure, True)
        return error_of(cause) if tells else None

    def leave_result(self, result: TrainResult) -> None:
        """Leave the result of the run to the launcher."""
        assert self._store is not None, (
            "the launcher starts as many workers as the plan has, and all are watched"
        )
        leave_result(self._store, result)

    def leave(self) -> None:
        """Say that this worker ends as it should, before its connections close.

        A script's process goes on by itself; a worker's own is watched until `await_others`.
        """
        self._heartbeat.enter("leaving the other workers")
        if self._next is not None:
            self._next.say_goodbye()
        if not self._own_process:
            self.stop()

    def await_others(self) -> None:
        """Say that all work of this worker is done; one that judges stays until that holds for all
        workers.

        Otherwise nobody would miss a worker that is stopped after the judges have ended, and the
        launcher would wait for it without an end.
        """
        store = self._store
        if store is None:
            return

        self._ended = True
        if self._detector is None:
            self.stop()
        # The store is gone where its host has ended, which waits for all others before.
        with suppress(RuntimeError):
            store.set(f"page/{self._rank}", self._own(0).model_dump_json())
            if self._rank < self._job.plan.workers:
                store.add(ENDED, 1)
            while self._detector is not None and store.add(ENDED, 0) < self._job.plan.workers:
                if self._stopped.wait(_ASKED_EVERY_S):
                    break

        self.stop()

    def stop(self) -> None:
        """End the supervision."""
        self._stopped.set()
        if self._next is not None:
            self._next.leave()
        # It is in the store's calls for moments only, but must not be when Python ends.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(ABORT_S)

    def _exchange(self) -> None:
        store = self._store
        assert store is not None
        for sequence in count(1):
            if self._stopped.wait(self._interval_s):
                return
            # In yet another thread: a call to a store that cannot be reached may never return.
            answers = within(self._timeout_s, partial(self._tell_and_ask, store, sequence))
            if answers == [None]:
                continue
            if answers and isinstance(answers[0], Failure):
                # The worker that failed ends first: torchrun ends all of a host with the first that
                # does.
                if not self._stopped.wait(_FIRST_ENDS_S) and self._ending.acquire(blocking=False):
                    tells = within(GRACE_S, partial(_is_first_here, store))
                    self._end_process(error_of(answers[0]) if tells != [False] else None)
            # Unless the main thread ends with an error of its own first.
            elif not self._stopped.wait(GRACE_S) and self._ending.acquire(blocking=False):
                self._end_process(
                    self._lost(
                        str(answers[0]) if answers else f"no answer for {self._timeout_s:.0f} s"
                    )
                )
            return

    def _tell_and_ask(self, store: Store, sequence: int) -> Failure | str | None:
        """Write this worker's page, look for workers that hang, and return the cause that somebody
        has reported, or what is wrong with the store.
        """
        try:
            store.set(f"page/{self._rank}", self._own(sequence).model_dump_json())
            if self._detector is not None:
                hang = self._detector.look(self._pages(store), time.monotonic())
                if hang is not None:
                    _post(store, hang)
            return cause_in(store)
        except RuntimeError as error:
            return first_line(error)

    def _pages(self, store: Store) -> dict[int, Page]:
        """Return the pages of the workers that have written one, by rank."""
        unknown = [rank for rank in range(self._job.plan.workers) if rank not in self._known]
        self._known += [rank for rank in unknown if store.check([f"page/{rank}"])]
        texts = store.multi_get([f"page/{rank}" for rank in self._known])
        pages = [record_in(text, "page", Page) for text in texts]
        return dict(zip(self._known, pages, strict=True))

    def _own(self, sequence: int) -> Page:
        beat = self._heartbeat.read(device=True)
        starved_s = 0.0
        # the second number: for how long the main thread waited for a core
        with suppress(OSError, ValueError):
            starved_s = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
        return Page(
            beat=beat,
            sequence=sequence,
            place=innermost(stacks_of_others(), self._job) if self._is_overdue(beat) else None,
            cpu_s=time.process_time(),
            starved_s=starved_s,
            ended=self._ended,
        )

    def _is_overdue(self, beat: Beat) -> bool:
        """Return whether the worker may soon be judged to hang: only then does anybody ask where in
        its code it is.
        """
        moment = beat.beats, beat.device
        now_s = time.monotonic()
        if moment != self._newest_beat:
            self._newest_beat = moment
            self._moved_s = now_s
        return now_s - self._moved_s >= _OVERDUE_SHARE * self._timeout_s

    def _gone(self, store: Store, rank: int) -> None:
        with suppress(RuntimeError):  # the store is gone, too: then `_exchange` tells
            # When a worker dies, torchrun ends the other workers of its host, and their connections
            # break as well: the first one of which that was recorded counts.
            first = store.compare_set("gone", "", str(rank))
            rank = int(first) if first.isdigit() else rank
            time.sleep(_LAST_WORDS_S)
            if cause_in(store) is not None:
                return
            beat = last_beat(store, rank)
            heard = "while starting" if beat is None else beat.doing  # may be seconds old
            failure = Failure(
                rank=rank,
                stage=stage_of(self._job, rank, beat),
                message=f"its process is gone and left no reason; last heard of {heard}",
                hint=f"it was killed, or its host went down; {MEMORY_HINT}",
                exit_code=WorkerError.exit_code,
                consequence=False,
            )
            _post(store, failure)

    def _lost(self, reason: str) -> WorkerError:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        name = worker_name(self._rank, stage_of(self._job, self._rank, self._heartbeat.read()))
        return WorkerError(
            f"{name}, {self._heartbeat.read().doing}: lost torchrun's store at {place}: {reason}",
            hint="its host or the link to it is down, or another worker failed first: see the "
            "first host",
        )


def _post(store: Store, failure: Failure) -> None:
    # The first report that is no consequence of others is the cause for all.
    store.set(failure_key(failure.rank), failure.model_dump_json())
    if not failure.consequence:
        store.compare_set(CAUSE, "", str(failure.rank))


def _is_first_here(store: Store) -> bool:
    # Each host reports an error once.
    return bool(store.add(f"told/{os.environ.get('GROUP_RANK') or socket.gethostname()}", 1) == 1)


def _log_and_end(error: PlannerError | None) -> NoReturn:
    # From a thread, because the main thread may wait for a worker that is gone.
    if error is not None:
        _log.error("%s", printable(str(error)))
    end_process(1)
