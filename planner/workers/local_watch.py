"""Watch over the workers of one launcher: end the run when one hangs, and say why a run failed.

The launcher reads what workers leave in the job's folder: a page of memory per worker, which says what its main thread
does, and the reasons of failures. The watch in torchrun's store (`planner.workers.watch`) needs a thread of each worker
that still runs. This one needs no help of theirs: it sees a worker that hangs with the interpreter's lock, one that is
alone in its run, one that has not started yet, and what a killed one did last.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from planner.errors import WorkerError
from planner.formats.files import save_record
from planner.workers.failures import WorkersFailedError, error_of, innermost, stage_of, worker_name
from planner.workers.hangs import Hang, HangDetector, look_at
from planner.workers.heartbeat import Beat, Heartbeat
from planner.workers.job import Failure, Job

INTERVAL_S = 0.5
_DUMP_SIGNAL = signal.SIGUSR1  # makes a worker dump its stack
_DUMP_S = 2.0  # how long a worker has to do that
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def start_heartbeat(job: Job) -> Heartbeat:
    """Start to note what this worker does: where the launcher reads it, or else in its own memory."""
    rank = int(os.environ["RANK"])
    if job.folder is None:
        return Heartbeat()
    folder = Path(job.folder)
    # Never closed: the handler writes to it for as long as the process lives.
    faulthandler.register(_DUMP_SIGNAL, file=_dump_path(folder, rank).open("w"), all_threads=True)
    heartbeat = Heartbeat(beat_path(folder, rank))
    heartbeat.enter("starting")
    return heartbeat


def beat_path(folder: Path, rank: int) -> Path:
    """Return the path of the page on which worker `rank` writes what it does."""
    return folder / f"heartbeat-{rank}"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """Return what worker `rank` did last; None if it has not begun."""
    try:
        page = beat_path(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    return Beat.read(page) if page else None


def leave_failure(folder: Path, failure: Failure) -> None:
    """Write `failure` for the launcher."""
    save_record(failure, folder / f"failure-{failure.rank}.json")


class LocalWatch(threading.Thread):
    """Reads the workers' heartbeats in `folder` until it is stopped."""

    def __init__(self, folder: Path, job: Job) -> None:
        super().__init__(name="hang watch", daemon=True)
        self._folder = folder
        self._job = job
        self._detector = HangDetector([stage.ranks for stage in job.plan.stages], job.run_options.hang_timeout_s)
        self._ended = threading.Event()
        self._starting: dict[int, int] = {}  # process ids by rank, of workers that have no page yet

    def run(self) -> None:
        """Wait until a worker hangs, leave its failure and kill it. The launcher then ends the others."""
        while not self._ended.wait(min(INTERVAL_S, self._job.run_options.hang_timeout_s / 5)):
            beats = {rank: beat for rank in range(self._job.plan.workers) if (beat := self._beat(rank)) is not None}
            hang = self._detector.look({rank: look_at(beat) for rank, beat in beats.items()}, time.monotonic())
            if hang is not None:
                self._end(hang)
                return

    def stop(self) -> None:
        """Stop watching; no worker is killed after this."""
        self._ended.set()
        self.join()

    def _beat(self, rank: int) -> Beat | None:
        """Return what worker `rank` does; None before its process exists."""
        beat = read_beat(self._folder, rank)
        if beat is None and rank not in self._starting:
            self._starting |= _children()
        if beat is None and rank in self._starting:
            return Beat.none_yet(self._starting[rank])
        return beat

    def _end(self, hang: Hang) -> None:
        beat = self._beat(hang.rank)
        assert beat is not None
        place = self._place(hang.rank, beat.pid) if hang.busy else None
        # The reason comes before the kill, which wakes the launcher and makes it look for one.
        leave_failure(self._folder, hang.failure(place))
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGKILL)

    def _place(self, rank: int, pid: int) -> str | None:
        path = _dump_path(self._folder, rank)
        if not path.exists():  # no handler yet: the signal would end the process
            return None
        with suppress(ProcessLookupError):
            os.kill(pid, _DUMP_SIGNAL)
        deadline, before, dump = time.monotonic() + _DUMP_S, "", ""
        # A worker that gets little of a core may still be writing.
        while (not dump or dump != before) and time.monotonic() < deadline:
            time.sleep(0.1)
            before, dump = dump, path.read_text(encoding="utf-8", errors="replace")
        return place_in_dump(dump, self._job)


def place_in_dump(dump: str, job: Job) -> str | None:
    """Return where a worker is, from faulthandler's dump of all threads; None for an empty dump.

    It has the main thread last, and each thread's innermost frame first.
    """
    threads = [_FRAME.finditer(thread) for thread in reversed(dump.split("most recent call first"))]
    return innermost(
        [[(frame["file"], int(frame["line"]), frame["function"]) for frame in frames][::-1] for frames in threads], job
    )


def explain(exit_codes: Mapping[int, int], folder: Path, job: Job) -> WorkersFailedError:
    """Return the first cause of a failed run.

    Candidates, in this order: the first worker's own error; a signal, except SIGTERM, with which the launcher itself
    ends the remaining workers; a lost connection; an exit code alone.

    Args:
        exit_codes: by rank, of the workers that failed; negative for a signal.
        folder: with the workers' failures and heartbeats.
        job: that they ran.
    """
    paths = sorted(folder.glob("failure-*.json"), key=lambda path: path.stat().st_mtime_ns)
    left = [Failure.model_validate_json(path.read_text("utf-8")) for path in paths]
    # A stable sort: the first worker's own error, or else the first consequence of one.
    left.sort(key=lambda failure: failure.consequence)
    signals = [rank for rank, code in sorted(exit_codes.items()) if code < 0 and code != -signal.SIGTERM]
    if left and not (left[0].consequence and signals):
        return error_of(left[0])
    rank = min(signals or exit_codes)
    beat = read_beat(folder, rank) if signals else None
    hint = "look for the reason in its last messages"
    ended = f"ended with exit code {exit_codes[rank]} and left no reason"
    if signals:
        name = signal.Signals(-exit_codes[rank]).name
        ended = f"was killed by {name}, {'while starting' if beat is None else beat.describe()}"
        if name == "SIGKILL":
            hint = "the system ends processes that exhaust its memory; see the kernel's log"
    message = f"{worker_name(rank, stage_of(job, rank, beat))} {ended}"
    return WorkersFailedError(message, hint=hint, exit_code=WorkerError.exit_code, again=True)


def _dump_path(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def _children() -> dict[int, int]:
    """Return process ids by rank of the workers that this process started; none on systems without /proc."""
    found: dict[int, int] = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listed.read_text().split()):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(text[5:]): pid for text in variables if text.startswith(b"RANK=")}
    return found
