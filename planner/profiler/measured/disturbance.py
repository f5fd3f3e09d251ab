"""Notice what disturbs a measurement: other processes that use the machine's cores, and times that change meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from planner.formats.profile import Disturbance
from planner.profiler.measured.steps import StepTimes

_STAT = Path("/proc/stat")
_RESTING = (3, 4)  # columns of /proc/stat: idle, and idle while the disk works


class OtherProcesses:
    """Counts the cores that other processes use from now on.

    Args:
        own: further processes of this measurement, each with a core of its own, which do not count.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._start = _busy_s(), time.process_time(), time.perf_counter()

    def cores(self) -> float | None:
        """Return how many cores others have used on average; None where the system does not tell."""
        busy_s, used_s, at_s = self._start
        now_s = _busy_s()
        elapsed_s = time.perf_counter() - at_s
        if busy_s is None or now_s is None or elapsed_s <= 0:
            return None
        return max(0.0, (now_s - busy_s - (time.process_time() - used_s)) / elapsed_s - self._own)


def step_s(times: StepTimes) -> float:
    """Return the median seconds of the steps, without their update."""
    return median(map(sum, zip(times.forward_s, times.backward_s, strict=True)))


def disturbance(whole: Sequence[StepTimes], others_cores: float | None, threads: int) -> Disturbance:
    """Say what disturbed the measurement of the whole step.

    Args:
        whole: times of a first measurement, and of a second one if there was one.
        threads: of this one. The first of several waits for the others, too.
    """
    wall_s = sum(sum(times.forward_s) + sum(times.backward_s) for times in whole)
    thread_s = sum(sum(times.forward_thread_s) + sum(times.backward_thread_s) for times in whole)
    drift = step_s(whole[1]) / step_s(whole[0]) - 1 if len(whole) > 1 else None
    alone = threads == 1 and thread_s > 0
    return Disturbance(
        waited_share=max(0.0, 1 - thread_s / wall_s) if alone else None, others_cores=others_cores, drift=drift
    )


def _busy_s() -> float | None:
    """Return the seconds that all cores together have worked since the machine's start."""
    try:
        ticks = [int(word) for word in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:8]]
    except (OSError, ValueError):
        return None
    return sum(count for column, count in enumerate(ticks) if column not in _RESTING) / os.sysconf("SC_CLK_TCK")
