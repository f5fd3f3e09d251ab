"""Sweep one quantity of the cluster: how the plan changes with it, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

from planner.analysis.solve_options import SolveOptions
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.plan import Bottleneck
from planner.formats.profile import Profile

Quantity = Literal["bandwidth", "gpus", "memory"]
ClusterAt = Callable[[float], Cluster]

MOST_POINTS = 200
PRECISION = 0.01  # relative, of the values at which the config changes
MOST_CHANGES = 8  # to look for between two adjacent points


class SweepPoint(Record):
    """The plan for one value of the quantity; its fields are None if no plan fits."""

    value: float  # bytes/s, GPUs or bytes
    config: str | None
    workers: int | None = None
    seconds_per_minibatch: float | None = None
    microbatches: int | None = None
    samples_per_s: float | None = None
    speedup_over_one_gpu: float | None = None
    speedup_over_data_parallel: float | None = None
    bottleneck: Bottleneck | None = None
    why_not: str | None = None  # if no plan fits


class ConfigChange(Record):
    """A change of config between two values, which are within `PRECISION` or adjacent integers."""

    below: float
    from_config: str | None
    above: SweepPoint  # the first with another config


class Sweep(Record):
    """Points in ascending order of the quantity, and the changes of config found between them."""

    model: str
    quantity: Quantity
    points: tuple[SweepPoint, ...]
    changes: tuple[ConfigChange, ...]


PointAt = Callable[[float], SweepPoint]


def sweep(
    profile: Profile,
    quantity: Quantity,
    values: Sequence[float],
    cluster_at: ClusterAt,
    *,
    options: SolveOptions | None = None,
) -> Sweep:
    """Solve for each value, and bisect between adjacent values whose configs differ.

    Args:
        profile: costs per layer.
        quantity: what the values are: bytes/s, a number of GPUs, or bytes of memory per GPU.
        values: see `spread`.
        cluster_at: returns the cluster with a value.
        options: how to solve; by default as `solve` does.

    Raises:
        InputError: as `solve`. That no plan fits a cluster is an answer, not an error.
    """
    options = options or SolveOptions()
    points = [_point(profile, value, cluster_at, options) for value in sorted(set(values))]
    changes: list[ConfigChange] = []
    for low, high in pairwise(points):
        changes += _changes(low, high, quantity, lambda value: _point(profile, value, cluster_at, options))
    return Sweep(model=profile.model, quantity=quantity, points=tuple(points), changes=tuple(changes))


def spread(low: float, high: float, points: int, whole: bool) -> list[float]:
    """Spread values from `low` to `high` in equal ratios; `whole` numbers only, all of them if `points` suffice.

    Raises:
        InputError: for a range that runs backwards, or a number of points that makes no sense.
    """
    if low > high:
        raise InputError("the range runs backwards", hint="write the smaller value first, as in 1Gbps:100Gbps")
    if not 2 <= points <= MOST_POINTS:
        raise InputError(f"{points} points make no sweep", hint=f"give `points` from 2 to {MOST_POINTS}")
    if low == high:
        return [low]
    if whole and high - low < points:
        return [float(value) for value in range(int(low), int(high) + 1)]
    ratio = (high / low) ** (1 / (points - 1))
    values = [low * ratio**step for step in range(points - 1)] + [high]
    return sorted({float(round(value)) for value in values}) if whole else values


def _point(profile: Profile, value: float, cluster_at: ClusterAt, options: SolveOptions) -> SweepPoint:
    try:
        plan = options.solve(profile, cluster_at(value))
    except InfeasibleError as error:
        return SweepPoint(value=value, config=None, why_not=error.message)
    predicted = plan.predicted
    return SweepPoint(
        value=value,
        config=plan.config,
        workers=plan.workers,
        seconds_per_minibatch=predicted.seconds_per_minibatch,
        microbatches=plan.microbatches,
        samples_per_s=predicted.samples_per_s,
        speedup_over_one_gpu=predicted.speedup_over_one_gpu,
        speedup_over_data_parallel=predicted.speedup_over_data_parallel,
        bottleneck=predicted.bottleneck,
    )


def _changes(low: SweepPoint, high: SweepPoint, quantity: Quantity, point_at: PointAt) -> list[ConfigChange]:
    """Find the changes between two points, each by bisection from the one before it."""
    found: list[ConfigChange] = []
    while low.config != high.config and len(found) < MOST_CHANGES:
        below, above = low, high
        while not _adjacent(below.value, above.value, quantity):
            middle = point_at(_middle(below.value, above.value, quantity))
            below, above = (middle, above) if middle.config == low.config else (below, middle)
        found.append(ConfigChange(below=below.value, from_config=below.config, above=above))
        low = above
    return found


def _adjacent(low: float, high: float, quantity: Quantity) -> bool:
    return high - low <= 1 if quantity == "gpus" else high <= low * (1 + PRECISION)


def _middle(low: float, high: float, quantity: Quantity) -> float:
    middle = math.sqrt(low * high)
    return middle if quantity == "bandwidth" else float(min(max(math.floor(middle), math.floor(low) + 1), high - 1))
