"""Watch over the workers of one launcher: end the run when one hangs, and leave the reason."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from planner.formats.files import save_record
from planner.workers.failures import place_in_dump, read_beat
from planner.workers.hangs import Hang, HangDetector, Sign
from planner.workers.heartbeat import Beat
from planner.workers.job import Job

INTERVAL_S = 0.5
DUMP_SIGNAL = signal.SIGUSR1  # makes a worker dump its stack
_DUMP_S = 2.0  # how long a worker has to do that


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
            hang = self._detector.look(self._signs(), time.monotonic())
            if hang is not None:
                self._end(hang)
                return

    def stop(self) -> None:
        """Stop watching; no worker is killed after this."""
        self._ended.set()
        self.join()

    def _signs(self) -> dict[int, Sign]:
        signs = {}
        for rank in range(self._job.plan.workers):
            beat = self._beat(rank)
            if beat is not None:
                signs[rank] = look_at(beat)
        return signs

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
        save_record(hang.failure(place), self._folder / f"failure-{hang.rank}.json")
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGKILL)

    def _place(self, rank: int, pid: int) -> str | None:
        path = dump_path(self._folder, rank)
        if not path.exists():  # no handler yet: the signal would end the process
            return None
        with suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
        deadline, before, dump = time.monotonic() + _DUMP_S, "", ""
        # A worker that gets little of a core may still be writing.
        while (not dump or dump != before) and time.monotonic() < deadline:
            time.sleep(0.1)
            before, dump = dump, path.read_text(encoding="utf-8", errors="replace")
        return place_in_dump(dump, self._job)


def dump_path(folder: Path, rank: int) -> Path:
    """Return the path to which worker `rank` dumps its stack."""
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


def look_at(beat: Beat) -> Sign:
    """Return the beat with its process' times, and what has stopped the process, if anything; alone without /proc."""
    process = Path(f"/proc/{beat.pid}")
    try:
        fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return Sign(beat)
    # proc_pid_stat(5), after the name: the state is field 0, user and system time are fields 11 and 12.
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    frozen = {"T": "is stopped by a signal (SIGSTOP)", "t": "is held by a debugger"}
    ran_s, starved_s = times_of_main_thread(process)
    return Sign(beat, max(cpu_s, ran_s), starved_s, frozen.get(fields[0]))


def times_of_main_thread(process: Path = Path("/proc/self")) -> tuple[float, float]:
    """Return the seconds that a process' main thread has had a core and waited for one; zeros if they cannot be read.

    They are exact, where the times of the whole process come in ticks of 10 ms: a starved one runs less between looks.
    """
    try:
        ran_ns, waited_ns, _ = map(int, (process / "schedstat").read_text().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return ran_ns / 1e9, waited_ns / 1e9
