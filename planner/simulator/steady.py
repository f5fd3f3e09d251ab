"""Which part of a run is its steady state, and how fast the run is there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

PERIODS = 4  # of the round-robin, in which a pipeline may repeat itself
LOOKED_AT = 16  # units at least, to say so
_REPEATS = 1e-7  # relative difference of times that counts as none
_SAME = 1e-9  # of two stages with the same pace the first is taken


@dataclass(frozen=True)
class Steady:
    """A part of a run between completions in its middle, whole periods apart."""

    start_s: float
    end_s: float
    seconds_per_minibatch: float


def steady_state(
    ends_s: Sequence[Sequence[float]],
    admitted_s: Sequence[float] | None,
    ranks: Sequence[Sequence[int]],
    microbatches: int,
    minibatches: int,
    accumulate: int = 1,
) -> Steady | None:
    """The steady part of a run, by its slowest stage: others may still be working off what piled up before them.

    Args:
        ends_s: of each stage's backwards, ascending.
        admitted_s: when each stage was done with its last forward: from then on a pipeline that never drains otherwise
            is at its end. None for one that drains after every minibatch.
        ranks: of each stage.
        microbatches: per minibatch.
        minibatches: of the run.
        accumulate: minibatches per replica between two updates, under 1f1b.

    Returns:
        None for a run too short to have one.
    """
    replicas = [len(each) for each in ranks]
    period = whole = microbatches
    if microbatches == 1:
        period = whole = math.lcm(*replicas) * accumulate
        if 8 * period > minibatches:
            period = max(replicas) * accumulate
    slowest: Steady | None = None
    lasts = []
    for stage, ends in enumerate(ends_s):
        completed = len(ends) if admitted_s is None else bisect_right(ends, admitted_s[stage])
        first, last = steady_range(completed, period)
        lasts.append(last)
        if first < last:
            start, end = float(ends[first]), float(ends[last])
            seconds = (end - start) / (last - first) * microbatches
            if slowest is None or seconds > slowest.seconds_per_minibatch * (1 + _SAME):
                slowest = Steady(start, end, seconds)
    if slowest is not None and (exactly := repeating_s(ends_s, lasts, whole)) is not None:
        return Steady(slowest.start_s, slowest.end_s, exactly * microbatches)
    return slowest


def repeating_s(ends_s: Sequence[Sequence[float]], lasts: Sequence[int], period: int) -> float | None:
    """Seconds per unit where the run repeats itself; None where it does not.

    It does where, in all stages, every one of the last units ended as long after the one a few periods before it.

    Args:
        ends_s: of each stage's backwards, ascending.
        lasts: of each stage, which of them is the last to be looked at.
        period: units after which it could repeat itself, or a few times as many.
    """
    for periods in range(1, PERIODS + 1):
        units = periods * period
        looked_at = max(units, LOOKED_AT)
        if min(lasts) < units + looked_at:
            return None
        took_s = ends_s[0][lasts[0]] - ends_s[0][lasts[0] - units]
        if all(
            abs(ends[number] - ends[number - units] - took_s) <= _REPEATS * took_s
            for ends, last in zip(ends_s, lasts, strict=True)
            for number in range(last, last - looked_at, -1)
        ):
            return took_s / units
    return None


def steady_range(completions: int, period: int = 1) -> tuple[int, int]:
    """Two completions, by number, between which the pipeline is in its steady state; 0 and 0 for runs too short.

    The first half of the run may still be filling the pipeline, its last eighth draining it.

    Args:
        completions: how many the run had.
        period: completions come in bursts of this many; the two are whole periods apart.
    """
    first = completions // 2
    periods = (completions - completions // 8 - 1 - first) // period
    return (first, first + periods * period) if periods > 0 else (0, 0)
