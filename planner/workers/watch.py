"""Watch over a run from within its workers: each says through torchrun's store what it does and why it fails.

A thread of each worker writes the worker's heartbeat to the store every second or two. It has a connection of its own,
because the training's connections are what may hang. Worker 0 reads the heartbeats of all and judges them; the others
read that it did, and the next of them takes over when it does not: what the store answers grows with the number of
workers, not with its square. A worker that reads the cause of a hang, or of another's failure, ends from that thread,
and each host reports it once: under NCCL the main thread waits in calls of CUDA that nothing can interrupt.

Heartbeats would tell only after a time-out that a process is gone, and so would NCCL, whose kernels wait on the device
for a peer that was killed. So each worker also waits for a message that the next one never sends: a connection that
breaks ends the wait at once.

Workers of `planner.workers.launch` are watched by their launcher instead: see `planner.workers.local_watch`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from traceback import extract_stack
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import PlannerError, WorkerError, first_line
from planner.formats.files import Record
from planner.workers.ending import ABORT_S, GRACE_S, within
from planner.workers.failures import error_of, innermost, stage_of, worker_name
from planner.workers.hangs import HangDetector, Sign, times_of_main_thread
from planner.workers.heartbeat import Beat, Heartbeat
from planner.workers.job import Failure, Job

Ending = Callable[[PlannerError | None], NoReturn]
_FOR_EVER = timedelta(days=365)
_CONNECT = timedelta(seconds=60)
_FIRST_ENDS_S = ABORT_S + 1.0  # for a worker that failed to abort its groups and end
_LAST_WORDS_S = 1.0  # until the report of a worker that failed can be read in the store


class NextWorker:
    """Watches the process of the next worker, the first one's for the last, until that worker says goodbye.

    All workers make one, at the same time and after they have joined.

    Args:
        on_gone: is told the rank of the next worker when its process is gone, in a thread.
    """

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        rank, self._workers = dist.get_rank(), dist.get_world_size()
        self._next, self._previous = (rank + 1) % self._workers, (rank - 1) % self._workers
        self._on_gone = on_gone
        self._left = False
        # gloo, whose connections break with the process, and of its own: when an operation on a group runs out of
        # time, gloo closes all the group's connections.
        self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._thread = threading.Thread(target=self._wait, name="next worker", daemon=True)
        if self._workers > 1:
            self._thread.start()

    def say_goodbye(self) -> None:
        """Tell the previous worker that this one ends as it should, and watch no longer."""
        self._left = True
        if self._workers > 1:
            within(ABORT_S, lambda: dist.send(torch.zeros(1), self._previous, self._group))
            # Until the next one has said goodbye, too: an interpreter that ends while a thread is in a library's call
            # aborts the process.
            self._thread.join(ABORT_S)

    def leave(self) -> None:
        """Watch no longer, because this worker ends with an error that the others learn otherwise."""
        self._left = True

    def _wait(self) -> None:
        goodbye = False
        with suppress(RuntimeError):
            dist.recv(torch.zeros(1), self._next, self._group)
            goodbye = True
        if not goodbye and not self._left:
            self._on_gone(self._next)


class _Page(Record):
    """What a worker writes into the store of itself, again and again."""

    beat: str  # its heartbeat's page, in hexadecimal
    sequence: int  # of this writing
    place: str | None  # in its code
    cpu_s: float
    starved_s: float


class StoreWatch:
    """Watches all workers from this one, through torchrun's store, until it is stopped.

    Args:
        job: that they run.
        heartbeat: this worker's.
        end_process: reports the error, if there is one, and ends the process from a thread: the main thread may wait
            in a library call that nothing can interrupt.
        hangs: whether a worker that does nothing new for the time-out has failed.
    """

    def __init__(
        self,
        job: Job,
        heartbeat: Heartbeat,
        end_process: Ending,
        *,
        hangs: bool = True,
    ) -> None:
        self._job, self._heartbeat, self._end_process, self._hangs = job, heartbeat, end_process, hangs
        self._rank = int(os.environ["RANK"])
        self._timeout_s = job.run_options.hang_timeout_s
        self._detector: HangDetector | None = None  # while this worker judges
        self._judged, self._judged_at_s = b"", time.monotonic()  # by whom, how often; when this worker saw that
        # At least ten exchanges within a time-out: a worker counts as silent after half of it.
        self._interval_s = min(2.0, self._timeout_s / 10)
        self._stopped = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends this worker
        self._main = threading.main_thread().ident
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._place = f"{host}:{port}"
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
        self._store = PrefixStore(f"plan/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self._next: NextWorker | None = None
        self._reached = 0  # number of the last exchange with the store
        self._known = [self._rank]  # ranks that have written a page
        self._last_sequence: dict[int, tuple[int, float]] = {}  # by rank, and when it was new
        targets = (self._exchange, self._watch_exchange)
        self._threads = [threading.Thread(target=target, name="hang watch", daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def watch_next(self) -> None:
        """Watch the next worker's process from now on; all workers call it once they have joined."""
        self._next = NextWorker(self._gone)

    def say_goodbye(self) -> None:
        """Tell the others that this worker ends as it should, before its connections close."""
        if self._next is not None:
            self._next.say_goodbye()

    def stop(self) -> None:
        """Stop watching, because this worker is about to end."""
        self._stopped.set()
        if self._next is not None:
            self._next.leave()
        for thread in self._threads:  # they are in the store's calls for moments only, but must not be when Python ends
            if thread is not threading.current_thread():
                thread.join(ABORT_S)

    def post(self, failure: Failure) -> None:
        """Report to the others why this worker ends; from now on no other thread ends it."""
        self._ending.acquire()  # waits for ever where another thread is ending this process
        self._stopped.set()
        # Bounded, because the store's host may be what failed.
        within(GRACE_S, lambda: self._post(failure))

    def explained(self, failure: Failure) -> PlannerError | None:
        """Return the error to end with after `failure` was posted, or None if this host has reported one already.

        If `failure` is only a consequence, wait for another worker to report the cause.
        """
        # torchrun, which holds the store, may be gone as well.
        agreed = within(2 * GRACE_S, lambda: self._agreed(failure))
        cause, tells = agreed[0] if agreed else (failure, True)
        return error_of(cause) if tells else None

    def _agreed(self, failure: Failure) -> tuple[Failure, bool]:
        """Return the cause that all end with, and whether this worker is the one of its host that tells."""
        cause = None if failure.consequence else failure
        deadline = time.monotonic() + GRACE_S
        while cause is None and time.monotonic() < deadline:
            time.sleep(0.1)
            cause = self._cause()
        return cause or failure, self._is_first_here()

    def _post(self, failure: Failure) -> None:
        """Report why a worker ends. The first report that is no consequence of others is the cause for all."""
        text = failure.model_copy(update={"traceback": ""}).model_dump_json()
        self._store.set(f"failure/{failure.rank}", text)
        if not failure.consequence:
            self._first("cause", failure.rank)

    def _cause(self) -> Failure | None:
        """Return the failure that the run ends with, if one was reported."""
        rank = self._store.compare_set("cause", "", "")  # empty where it is missing, without a wait
        return Failure.model_validate_json(self._store.get(f"failure/{int(rank)}")) if rank else None

    def _is_first_here(self) -> bool:
        """Return whether this worker is the first of its host to ask, so that each host reports an error once."""
        asked: int = self._store.add(f"told/{os.environ.get('GROUP_RANK') or socket.gethostname()}", 1)
        return asked == 1

    def _first(self, key: str, rank: int) -> int:
        """Set a key where it is missing, and return what it holds then."""
        return int(self._store.compare_set(key, "", str(rank)))

    def _pages(self) -> dict[int, _Page]:
        """Return by rank what all wrote that have written."""
        unknown = [rank for rank in range(self._job.plan.workers) if rank not in self._known]
        self._known += [rank for rank in unknown if self._store.check([f"page/{rank}"])]
        texts = self._store.multi_get([f"page/{rank}" for rank in self._known])
        return {rank: _Page.model_validate_json(text) for rank, text in zip(self._known, texts, strict=True)}

    def _exchange(self) -> None:
        """Write this worker's heartbeat, judge all if it is this worker's turn, and read the verdict, in a thread."""
        sequence = 0
        while not self._stopped.wait(self._interval_s):
            sequence += 1
            try:
                self._store.set(f"page/{self._rank}", self._own(sequence).model_dump_json())
                if self._hangs and self._judges():
                    self._store.set("judged", f"{self._rank} {sequence}")
                    self._judge(self._pages())
                cause = self._cause()
            except RuntimeError as error:
                self._lost(first_line(error))
                return
            self._reached = sequence
            if cause is not None:
                # The worker that failed ends first: torchrun ends all of a host with the first that does.
                if not self._stopped.wait(_FIRST_ENDS_S):
                    self._end_with(cause)
                return

    def _judges(self) -> bool:
        """Return whether this worker judges all: worker 0 does, or the first of the others that misses its verdicts."""
        judged, now_s = self._store.compare_set("judged", "", ""), time.monotonic()
        if judged != self._judged:
            self._judged, self._judged_at_s = judged, now_s
        others = judged and int(judged.split()[0]) != self._rank
        patience_s = self._timeout_s / 2 + min(self._rank * self._interval_s, self._timeout_s)
        if self._rank and (others or not judged) and now_s - self._judged_at_s < patience_s:
            self._detector = None
            return False
        if self._detector is None:  # by then half of the time-out has passed for whoever judged before
            timeout_s = self._timeout_s / 2 if self._rank else self._timeout_s
            self._detector = HangDetector([stage.ranks for stage in self._job.plan.stages], timeout_s)
            self._last_sequence.clear()
        return True

    def _own(self, sequence: int) -> _Page:
        """Return this worker's page with the place in the code and the times that only its own process knows."""
        frames = sys._current_frames()
        frames.pop(threading.get_ident())
        threads = sorted(frames, key=lambda thread: thread != self._main)
        stacks = [[(f.filename, f.lineno or 0, f.name) for f in extract_stack(frames[thread])] for thread in threads]
        return _Page(
            beat=self._heartbeat.page.hex(),
            sequence=sequence,
            place=innermost(stacks, self._job),
            cpu_s=time.process_time(),
            starved_s=times_of_main_thread()[1],
        )

    def _judge(self, pages: Mapping[int, _Page]) -> None:
        """Report the worker that hangs, if one does, as the cause for all."""
        now = time.monotonic()
        # torchrun starts all workers at once, so one that has written nothing yet can hang, too.
        signs = {rank: Sign(Beat.none_yet(rank)) for rank in range(self._job.plan.workers) if rank not in pages}
        for rank, page in pages.items():
            beat = Beat.read(bytes.fromhex(page.beat))
            if beat is None:
                continue
            if self._last_sequence.get(rank, (None, now))[0] != page.sequence:
                self._last_sequence[rank] = page.sequence, now
            silent = now - self._last_sequence[rank][1] > self._timeout_s / 2
            frozen = "does not respond: it is stopped, or its host or its link is down" if silent else None
            signs[rank] = Sign(beat, page.cpu_s, page.starved_s, frozen)
        assert self._detector is not None
        hang = self._detector.look(signs, now)
        if hang is not None:
            self._post(hang.failure(pages[hang.rank].place if hang.busy and hang.rank in pages else None))

    def _end_with(self, cause: Failure) -> None:
        """End this worker because of `cause`, unless the main thread ends it already."""
        if self._ending.acquire(blocking=False):
            tells = within(GRACE_S, self._is_first_here)
            self._end_process(error_of(cause) if tells != [False] else None)

    def _gone(self, rank: int) -> None:
        """Report that the process of `rank` is gone, if it left no reason; each worker's `_exchange` then ends it."""
        with suppress(RuntimeError):  # the store is gone, too: then `_exchange` tells
            # When a worker dies, torchrun ends the other workers of its host, and their connections break as well:
            # the first one of which that was recorded counts.
            rank = self._first("gone", rank)
            time.sleep(_LAST_WORDS_S)
            if self._cause() is None:
                self._post(self._without_reason(rank))

    def _without_reason(self, rank: int) -> Failure:
        page = f"page/{rank}"
        beat = None
        if self._store.check([page]):
            beat = Beat.read(bytes.fromhex(_Page.model_validate_json(self._store.get(page)).beat))
        return Failure(
            rank=rank,
            stage=stage_of(self._job, rank, beat),
            message="its process is gone and left no reason; last heard of "  # its page may be seconds old
            + ("while starting" if beat is None else beat.describe()),
            hint="it was killed, or its host went down; the system ends processes that exhaust its memory: see the "
            "kernel's log",
            exit_code=WorkerError.exit_code,
            consequence=False,
        )

    def _watch_exchange(self) -> None:
        """Detect that `_exchange` is stuck, in a second thread: a call to an unreachable store may never return.

        It counts its own ticks instead of reading a clock: a process that was stopped as a whole and continues would
        otherwise blame the store.
        """
        reached, ticks = 0, 0
        while not self._stopped.wait(self._interval_s):
            ticks = ticks + 1 if self._reached == reached else 0
            reached = self._reached
            if ticks * self._interval_s > self._timeout_s:
                self._lost(f"no answer for {ticks * self._interval_s:.0f} s")
                return

    def _lost(self, reason: str) -> None:
        """End this worker because the store is gone, unless the main thread ends with an error of its own first."""
        if self._stopped.wait(GRACE_S) or not self._ending.acquire(blocking=False):
            return
        name = worker_name(self._rank, stage_of(self._job, self._rank, None))
        self._end_process(
            WorkerError(
                f"{name}, {self._heartbeat.read().describe()}: lost torchrun's store at {self._place}: {reason}",
                hint="its host or the link to it is down, or another worker failed first: see the first host",
            )
        )
