"""Watch over workers on several hosts under torchrun: through its store, each tells what it does and why it fails.

A thread of each worker writes the worker's heartbeat to the store every second or two and reads those of the others. It
has a connection of its own, because the training's connections are what may hang. A worker that finds the cause of a
hang ends, and each host reports it once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from traceback import extract_stack
from typing import NoReturn

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import PlannerError, WorkerError, first_line
from planner.executor.health.failures import GRACE_S, error_of, innermost, stage_of, worker_name
from planner.executor.health.hangs import Hang, HangDetector, Sign
from planner.executor.health.heartbeat import Beat, Heartbeat
from planner.executor.job import Failure, Job

_CONNECT = timedelta(seconds=60)


class Bulletin:
    """Failures that workers report to each other, in torchrun's store."""

    def __init__(self) -> None:
        self.place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=_CONNECT,
        )
        self.store = PrefixStore(f"plan/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def post(self, failure: Failure) -> None:
        """Report why this worker ends."""
        text = failure.model_copy(update={"traceback": ""}).model_dump_json()
        self.store.set(f"failure/{failure.rank}", text)

    def causes(self, workers: int) -> list[Failure]:
        """Return the failures reported so far that are not consequences of others."""
        keys = [key for key in (f"failure/{rank}" for rank in range(workers)) if self.store.check([key])]
        found = [Failure.model_validate_json(self.store.get(key)) for key in keys]
        return [failure for failure in found if not failure.consequence]

    def is_first_here(self) -> bool:
        """Return whether this worker is the first of its host to ask, so that each host reports an error once."""
        asked: int = self.store.add(f"told/{os.environ.get('GROUP_RANK', '0')}", 1)
        return asked == 1


class RemoteWatch:
    """Watches all workers from this one, until it is stopped.

    Args:
        job: that they run.
        heartbeat: this worker's.
        end_process: reports the error, if there is one, and ends the process from a thread: the main thread may wait
            in a library call that nothing can interrupt.
    """

    def __init__(self, job: Job, heartbeat: Heartbeat, end_process: Callable[[PlannerError | None], NoReturn]) -> None:
        self._job = job
        self._heartbeat = heartbeat
        self._end_process = end_process
        self._rank = int(os.environ["RANK"])
        self._everyone = set(range(job.plan.workers))
        self._detector = HangDetector([stage.ranks for stage in job.plan.stages], job.run_options.hang_timeout_s)
        # At least ten exchanges within a time-out: a worker counts as silent after half of it.
        self._interval_s = min(2.0, job.run_options.hang_timeout_s / 10)
        self._stopped = threading.Event()
        self._main = threading.main_thread().ident
        self._bulletin = Bulletin()
        self._reached = 0  # number of the last exchange with the store
        self._last_sequence: dict[int, tuple[int, float]] = {}
        for target in (self._exchange, self._supervise):
            threading.Thread(target=target, name="hang watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, because this worker is about to end."""
        self._stopped.set()

    def explained(self, failure: Failure) -> PlannerError | None:
        """Report `failure` to the others; return the error to end with, or None if this host has reported one already.

        If `failure` is only a consequence, wait for another worker to report the cause.
        """
        self.stop()
        try:
            self._bulletin.post(failure)
            causes = [] if failure.consequence else [failure]
            deadline = time.monotonic() + GRACE_S
            while not causes and time.monotonic() < deadline:
                time.sleep(0.1)
                causes = self._bulletin.causes(self._job.plan.workers)
            if not self._bulletin.is_first_here():
                return None
        except RuntimeError:  # torchrun, which holds the store, is gone as well
            causes = []
        return error_of(causes[0] if causes else failure)

    def _exchange(self) -> None:
        """Write this worker's heartbeat and judge all, in a thread."""
        sequence = 0
        known = {self._rank}
        while not self._stopped.wait(self._interval_s):
            sequence += 1
            try:
                self._bulletin.store.set(f"page/{self._rank}", self._own(sequence))
                known |= {rank for rank in self._everyone - known if self._bulletin.store.check([f"page/{rank}"])}
                ranks = sorted(known)
                pages = self._bulletin.store.multi_get([f"page/{rank}" for rank in ranks])
            except RuntimeError as cause:
                self._lost(first_line(cause))
                return
            self._reached = sequence
            hang = self._judge(ranks, pages)
            if hang is not None:
                self._end(hang, pages[ranks.index(hang.rank)] if hang.rank in ranks else None)
                return

    def _own(self, sequence: int) -> str:
        frame = sys._current_frames().get(self._main or 0)
        stack = [] if frame is None else [(f.filename, f.lineno or 0, f.name) for f in extract_stack(frame)]
        place = innermost(stack, self._job)
        page = self._heartbeat.page.hex()
        return json.dumps({"page": page, "sequence": sequence, "cpu_s": time.process_time(), "place": place})

    def _judge(self, ranks: Sequence[int], pages: Sequence[bytes]) -> Hang | None:
        now = time.monotonic()
        # torchrun starts all workers at once, so one that has written nothing yet can hang, too.
        signs = {rank: Sign(Beat.none_yet(rank)) for rank in self._everyone - set(ranks)}
        for rank, text in zip(ranks, pages, strict=True):
            told = json.loads(text)
            beat = Beat.read(bytes.fromhex(told["page"]))
            if beat is None:
                continue
            last, since = self._last_sequence.get(rank, (None, now))
            if last != told["sequence"]:
                since = now
            self._last_sequence[rank] = (told["sequence"], since)
            silent = now - since > self._job.run_options.hang_timeout_s / 2
            frozen = "does not respond: it is stopped, or its host or its link is down" if silent else None
            signs[rank] = Sign(beat, told["cpu_s"], frozen)
        return self._detector.look(signs, now)

    def _end(self, hang: Hang, page: bytes | None) -> None:
        place = json.loads(page)["place"] if hang.busy and page is not None else None
        failure = hang.failure(place)
        self._end_process(error_of(failure) if self._bulletin.is_first_here() else None)

    def _supervise(self) -> None:
        """Detect that `_exchange` is stuck, in a second thread: a call to an unreachable store may never return.

        It counts its own ticks instead of reading a clock: a process that was stopped as a whole and continues would
        otherwise blame the store.
        """
        reached, ticks = 0, 0
        while not self._stopped.wait(self._interval_s):
            ticks = ticks + 1 if self._reached == reached else 0
            reached = self._reached
            if ticks * self._interval_s > self._job.run_options.hang_timeout_s:
                self._lost(f"no answer for {ticks * self._interval_s:.0f} s")
                return

    def _lost(self, reason: str) -> None:
        """End this worker because the store is gone, unless the main thread ends with an error of its own first."""
        if self._stopped.wait(GRACE_S):
            return
        name = worker_name(self._rank, stage_of(self._job, self._rank, None))
        self._end_process(
            WorkerError(
                f"{name}, {self._heartbeat.read().describe()}: lost torchrun's store at "
                f"{self._bulletin.place}: {reason}",
                hint="its host or the link to it is down, or another worker failed first: see the first host",
            )
        )
