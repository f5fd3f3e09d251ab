"""Find the steady state of a run, and the pace there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

PERIODS = 4  # of the round-robin over replicas, after which a pipeline may repeat itself
LOOKED_AT = 16  # units that must repeat, at least
REPEATS = 1e-7  # relative difference of times that counts as none
_SAME = 1e-9  # stages whose paces differ by less are equally slow, and the first of them counts


@dataclass(frozen=True)
class Completions:
    """When the stages of a run finished their units: microbatches, or minibatches that are not divided.

    Attributes:
        replicas: per stage.
        microbatches: per minibatch.
        accumulate: minibatches per replica between two updates, under 1f1b.
        asynchronous: whether the pipeline drains only at the end of the run, and not in every minibatch.
        ends_s: per stage, the ends of its backwards.
        last_forward_s: per stage, the end of its last forward, after which an asynchronous pipeline drains.
    """

    replicas: Sequence[int]
    microbatches: int
    accumulate: int
    asynchronous: bool
    ends_s: list[list[float]]
    last_forward_s: list[float]

    @cached_property
    def period(self) -> int:
        """Units after which every stage is at the same replica of the same round again."""
        return self.microbatches if self.microbatches > 1 else math.lcm(*self.replicas) * self.accumulate


@dataclass(frozen=True)
class Steady:
    """A part of a run between two completions in its middle, whole periods apart."""

    start_s: float
    end_s: float
    seconds_per_minibatch: float


def steady_state(completed: Completions, minibatches: int) -> Steady | None:
    """Find the steady part of a run of so many minibatches; None if the run is too short to have one.

    The slowest stage sets the pace: in a short run others may still be working off what piled up before them, and seem
    faster. If the whole run repeats itself, the pace is exact; otherwise it is the mean between two completions.
    """
    # Replicas finish in turn, but not always in order.
    completed = replace(completed, ends_s=[sorted(ends) for ends in completed.ends_s])
    period = completed.period
    if completed.microbatches == 1 and 8 * period > minibatches:
        # Replicas of different numbers have a long common period. The longest round is a good approximation.
        period = max(completed.replicas) * completed.accumulate
    slowest: Steady | None = None
    lasts = []
    for stage, ends in enumerate(completed.ends_s):
        count = bisect_right(ends, completed.last_forward_s[stage]) if completed.asynchronous else len(ends)
        first, last = steady_range(count, period)
        lasts.append(last)
        if first < last:
            start, end = float(ends[first]), float(ends[last])
            seconds = (end - start) / (last - first) * completed.microbatches
            if slowest is None or seconds > slowest.seconds_per_minibatch * (1 + _SAME):
                slowest = Steady(start, end, seconds)
    if slowest is not None and (exactly := repeating_s(completed, lasts)) is not None:
        return Steady(slowest.start_s, slowest.end_s, exactly * completed.microbatches)
    return slowest


def repeating_s(completed: Completions, lasts: Sequence[int] | None = None) -> float | None:
    """Return the seconds per unit of a run that repeats itself; None if it does not.

    A run repeats itself if, in every stage, each of the last units ended the same time after the unit a few periods
    before it. All stages are compared: a stage may be regular while another one still falls behind.

    Args:
        completed: of the run so far.
        lasts: per stage, the number of the last unit to look at; by default the last one.
    """
    ends_s = completed.ends_s
    lasts = lasts or [len(ends) - 1 for ends in ends_s]
    for periods in range(1, PERIODS + 1):
        units = periods * completed.period
        looked_at = max(units, LOOKED_AT)
        if min(lasts) < units + looked_at:
            return None
        took_s = ends_s[0][lasts[0]] - ends_s[0][lasts[0] - units]
        if all(
            abs(ends[number] - ends[number - units] - took_s) <= REPEATS * took_s
            for ends, last in zip(ends_s, lasts, strict=True)
            for number in range(last, last - looked_at, -1)
        ):
            return took_s / units
    return None


def steady_range(completions: int, period: int = 1) -> tuple[int, int]:
    """Return the numbers of two completions between which the pipeline is in its steady state; (0, 0) if none are.

    The first half of the run may still fill the pipeline, and the last eighth may drain it. Completions come in bursts
    of one `period`, so the two are whole periods apart.
    """
    first = completions // 2
    periods = (completions - completions // 8 - 1 - first) // period
    return (first, first + periods * period) if periods > 0 else (0, 0)
