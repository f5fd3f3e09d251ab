"""Detect a hang from the workers' heartbeats, and find its first cause.

A worker that waits is only a consequence as long as the peer that it waits for has not done its part. So the cause is,
in this order: a worker that does not respond at all; a worker whose own work does not end; a link that does not deliver
what was sent, when all workers wait. The streams of a checked plan cannot stop in any other way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from planner.errors import WorkerError
from planner.workers.heartbeat import Beat, State
from planner.workers.job import Failure

# A worker that uses more than this share of the time that it had a core to run on makes progress while it prepares.
BUSY_SHARE = 0.05
_LEAST_S = 0.1  # below this, what it ran and waited for a core tells nothing


@dataclass(frozen=True)
class Sign:
    """What others can see of a worker."""

    beat: Beat
    cpu_s: float | None = None  # processor time of the process; None if it cannot be read
    starved_s: float = 0.0  # its main thread was ready to run, and others had all cores
    frozen: str | None = None  # why it cannot respond: "is stopped by a signal"


@dataclass(frozen=True)
class Hang:
    """The first cause of a hang."""

    rank: int  # the worker to name and to end
    stage: int | None
    message: str
    busy: bool = False  # whether the place in its code tells more

    def failure(self, place: str | None) -> Failure:
        """Return the report of this hang; `place` is the line of code that the worker is at, if known."""
        return Failure(
            rank=self.rank,
            stage=self.stage,
            message=self.message + (f", at {place}" if place else ""),
            hint="look there for what may block; allow more time with `hang_timeout_s=SECONDS`",
            exit_code=WorkerError.exit_code,
            consequence=False,
        )


@dataclass
class _Seen:
    sign: Sign
    moved_s: float  # when it last moved
    starved_s: float = 0.0  # since then

    def stuck_s(self, now_s: float) -> float:
        """For how long it has not moved although it could have."""
        return now_s - self.moved_s - self.starved_s


class HangDetector:
    """Decides from the workers' signs whether the run hangs.

    Args:
        ranks: per stage, the workers that run it.
        timeout_s: how long a worker may do nothing new, in addition to the slowest instruction so far.
    """

    def __init__(self, ranks: Sequence[Sequence[int]], timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._seen: dict[int, _Seen] = {}

    def look(self, signs: Mapping[int, Sign], now_s: float) -> Hang | None:
        """Record the signs seen at `now_s`; return the cause once a worker has not moved for too long."""
        for rank, sign in signs.items():
            seen = self._seen.get(rank)
            if seen is None or _has_moved(seen, sign, now_s):
                self._seen[rank] = _Seen(sign, now_s)
            else:
                # Keeps the old times, so that progress is judged over the whole time since the worker moved.
                seen.starved_s = sign.starved_s - seen.sign.starved_s
                seen.sign = replace(sign, cpu_s=seen.sign.cpu_s, starved_s=seen.sign.starved_s)
        limit_s = self._timeout_s + max((seen.sign.beat.slowest_s for seen in self._seen.values()), default=0.0)
        stuck = {rank: seen.stuck_s(now_s) for rank, seen in self._seen.items()}
        longest = sorted(stuck, key=lambda rank: -stuck[rank])
        late = [rank for rank in longest if stuck[rank] > limit_s]
        if not late:
            return None
        # A worker that waits may have stopped up to a step before the cause did, which may not be late yet. So it is
        # looked for among all that have not moved for half the time: first one that does not respond, then one whose
        # own work does not end, which must be late itself.
        still = {rank: self._seen[rank].sign for rank in longest if stuck[rank] > limit_s / 2}

        def found(rank: int) -> str:
            beat = still[rank].beat
            device = "" if beat.device is None else f", its device {beat.device.describe()}"
            return f"has not moved for {stuck[rank]:.0f} s, {beat.describe()}{device}"

        for rank, sign in still.items():
            if sign.frozen is not None:
                return self._hang(rank, f"{found(rank)}: it {sign.frozen}")
        for rank, sign in still.items():
            # A host that is ahead waits for its device in any call: what the device is at is what the worker is at.
            if (sign.beat.device or sign.beat).state in (State.PREPARING, State.COMPUTING):
                return self._hang(rank, found(rank), busy=True) if rank in late else None
        if len(late) < len(set(chain(*self._ranks))):
            return None
        # All wait, the first one for what another one has sent: the streams of a checked plan cannot stop otherwise.
        waited = f"has waited for {stuck[late[0]]:.0f} s {self._seen[late[0]].sign.beat.describe()}"
        waited = waited.replace(" s waiting for", " s for")
        return self._hang(late[0], f"{waited}, and all others wait too: a link carries nothing, or lost a message")

    def _hang(self, rank: int, message: str, *, busy: bool = False) -> Hang:
        stage = self._seen[rank].sign.beat.stage
        if stage is None:
            stage = next((number for number, ranks in enumerate(self._ranks) if rank in ranks), None)
        return Hang(rank, stage, message, busy)


def _has_moved(seen: _Seen, sign: Sign, now_s: float) -> bool:
    before = seen.sign
    if (before.beat.pid, before.beat.beats) != (sign.beat.pid, sign.beat.beats):
        return True
    if before.beat.device != sign.beat.device:
        return True
    if sign.beat.state is not State.PREPARING or sign.cpu_s is None or before.cpu_s is None:
        return False
    ran_s, starved_s = sign.cpu_s - before.cpu_s, sign.starved_s - before.starved_s
    return ran_s + starved_s > _LEAST_S and ran_s > BUSY_SHARE * (now_s - seen.moved_s - starved_s)


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
