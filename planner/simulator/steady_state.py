"""Find the part of a run in which it repeats itself, and the time per minibatch there."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from planner.formats.files import replace
from planner.simulator.simulation import Completions

MOST_PERIODS = 4  # of the round-robin over replicas, after which a pipeline may repeat itself
LOOKED_AT = 16  # units that must repeat, at least
REPEATS = 1e-7  # relative difference of times that counts as none
_SAME = 1e-9  # stages whose paces differ by less are equally slow, and the first of them counts


class Steady(NamedTuple):
    """A part of a run between two completions in its middle, whole periods apart."""

    start_s: float
    end_s: float
    seconds_per_minibatch: float


def steady_state(completed: Completions, minibatches: int) -> Steady | None:
    """Return the steady part of the slowest stage of a run; None if the run is too short."""
    shape = completed.shape
    # Replicas finish in turn, but not always in order.
    completed = replace(completed, ends_s=[sorted(ends) for ends in completed.ends_s])
    period = completed.period
    if shape.microbatches == 1 and 8 * period > minibatches:
        # Replicas of different numbers have a long common period. The longest round is close to it.
        period = max(shape.replicas)

    slowest: Steady | None = None
    lasts: list[int] = []
    for stage, ends_s in enumerate(completed.ends_s):
        first, last = _whole_periods(completed, stage, period)
        lasts.append(last)
        if last == 0:
            continue
        start_s = float(ends_s[first])
        end_s = float(ends_s[last])
        seconds = (end_s - start_s) / (last - first) * shape.microbatches
        if slowest is None or seconds > slowest.seconds_per_minibatch * (1 + _SAME):
            slowest = Steady(start_s, end_s, seconds)

    if slowest is None:
        return None
    unit_s = repeating_s(completed, lasts)
    if unit_s is None:
        return slowest
    return slowest._replace(seconds_per_minibatch=unit_s * shape.microbatches)


def _whole_periods(completed: Completions, stage: int, period: int) -> tuple[int, int]:
    """Return the units of a stage between which the run is steady; the last is 0 if it is not.

    The first half of the run may still fill the pipeline, and the last eighth may drain it.
    Completions come in bursts of one period, so the two are whole periods apart.
    """
    ends_s = completed.ends_s[stage]
    count = len(ends_s)
    if completed.shape.asynchronous:
        count = bisect_right(ends_s, max(completed.forwards_s[stage]))
    first = count // 2
    periods = (count - count // 8 - 1 - first) // period
    if periods <= 0:
        return first, 0
    return first, first + periods * period


def repeating_s(completed: Completions, lasts: Sequence[int] = ()) -> float | None:
    """Return the seconds per unit of a run that has repeated itself at its end.

    Its last units all ended as long after those a few periods before.

    Args:
        completed: the run so far.
        lasts: per stage, the number of the last unit to look at; by default the last one.

    Returns:
        None if they did not within `MOST_PERIODS`, or if the run is too short.
    """
    ends_s = completed.ends_s
    lasts = lasts or [len(ends) - 1 for ends in ends_s]
    for periods in range(1, MOST_PERIODS + 1):
        units = periods * completed.period
        looked_at = max(units, LOOKED_AT)
        if min(lasts) < units + looked_at:
            return None
        took_s = ends_s[0][lasts[0]] - ends_s[0][lasts[0] - units]
        if repeats(ends_s, lasts, units, looked_at, took_s):
            return took_s / units

    return None


def repeats(
    ends_s: Sequence[Sequence[float]],
    lasts: Sequence[int],
    units: int,
    looked_at: int,
    took_s: float,
) -> bool:
    """Return whether the last units of all stages ended `took_s` after those `units` before."""
    tolerance_s = REPEATS * took_s
    return all(
        abs(ends[number] - ends[number - units] - took_s) <= tolerance_s
        for ends, last in zip(ends_s, lasts, strict=True)
        for number in range(last, last - looked_at, -1)
    )
