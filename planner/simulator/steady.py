"""Find the steady state of a run, and the pace there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

PERIODS = 4  # of the round-robin over replicas, after which a pipeline may repeat itself
LOOKED_AT = 16  # units that must repeat, at least
REPEATS = 1e-7  # relative difference of times that counts as none
_SAME = 1e-9  # stages whose paces differ by less are equally slow, and the first of them counts


@dataclass(frozen=True)
class Completions:
    """When the stages of a run finished their units: microbatches, or minibatches that are not divided."""

    replicas: Sequence[int]  # per stage
    microbatches: int  # per minibatch
    accumulate: int  # minibatches per replica between two updates, under 1f1b
    asynchronous: bool  # the pipeline drains only at the end of the run, and not in every minibatch
    ends_s: list[list[float]]  # per stage, the ends of its backwards
    last_forward_s: list[float]  # per stage, the end of its last forward: an asynchronous pipeline drains then

    @cached_property
    def period(self) -> int:
        """Units after which every stage is at the same replica of the same round again."""
        return self.microbatches if self.microbatches > 1 else math.lcm(*self.replicas) * self.accumulate


class Steady(NamedTuple):
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
        # The first half of the run may still fill the pipeline, and the last eighth may drain it. Completions come in
        # bursts of one period, so the two are whole periods apart.
        first = count // 2
        periods = (count - count // 8 - 1 - first) // period
        lasts.append(first + periods * period if periods > 0 else 0)
        if periods > 0:
            start, end = float(ends[first]), float(ends[lasts[-1]])
            seconds = (end - start) / (lasts[-1] - first) * completed.microbatches
            if slowest is None or seconds > slowest.seconds_per_minibatch * (1 + _SAME):
                slowest = Steady(start, end, seconds)
    if slowest is not None and (exactly := repeating_s(completed, lasts)) is not None:
        return slowest._replace(seconds_per_minibatch=exactly * completed.microbatches)
    return slowest


def repeating_s(completed: Completions, lasts: Sequence[int] | None = None) -> float | None:
    """Return the seconds per unit of a run that repeats itself; None if it does not.

    A run repeats itself if, in every stage, each of the last units ended the same time after the unit a few periods
    before it. All stages are compared: a stage may be regular while another one still falls behind. `lasts`: per stage,
    the number of the last unit to look at; by default the last one.
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
