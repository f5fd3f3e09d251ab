"""How the plan changes with one quantity of the cluster, and where it changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

from planner.analysis.question import Question
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import Cluster
from planner.formats.files import Record
from planner.formats.plan import Bottleneck, Plan
from planner.formats.profile import Profile

Quantity = Literal["bandwidth", "gpus", "memory"]
ClusterAt = Callable[[float], Cluster]

MOST_POINTS = 200
PRECISION = 0.01  # of the places where the plan changes, relative
MOST_CHANGES = 8  # looked for between two neighbouring points


class Point(Record):
    """The plan for one cluster; None throughout where none fits."""

    value: float  # bytes/s, GPUs or bytes
    config: str | None
    workers: int | None = None
    seconds_per_minibatch: float | None = None
    microbatches: int | None = None
    samples_per_s: float | None = None
    speedup_over_one_gpu: float | None = None
    speedup_over_data_parallel: float | None = None
    bottleneck: Bottleneck | None = None
    why_not: str | None = None  # where no plan fits


class Change(Record):
    """The config changes between two values, `PRECISION` apart or neighbouring integers."""

    below: float
    from_config: str | None
    above: Point  # the first with another config


class Sweep(Record):
    """Points in ascending order of the quantity, and every change of config between them that was found."""

    model: str
    quantity: Quantity
    points: tuple[Point, ...]
    changes: tuple[Change, ...]


def sweep(
    profile: Profile,
    quantity: Quantity,
    values: Sequence[float],
    cluster_at: ClusterAt,
    *,
    question: Question | None = None,
) -> Sweep:
    """Solve for each of the values, and bisect between those whose configs differ.

    Args:
        profile: costs per layer.
        quantity: what the values are: bytes/s, a number of GPUs, or bytes of memory per GPU.
        values: see `spread`.
        cluster_at: the cluster with that value.
        question: how to solve; the default is `solve`'s.

    Raises:
        InputError: as `solve`; a cluster that no plan fits is an answer here.
    """
    question = question or Question()
    points = [_point(profile, value, cluster_at, question) for value in sorted(set(values))]
    changes: list[Change] = []
    for low, high in pairwise(points):
        changes += _changes(low, high, quantity, lambda value: _point(profile, value, cluster_at, question))
    return Sweep(model=profile.model, quantity=quantity, points=tuple(points), changes=tuple(changes))


def spread(low: float, high: float, points: int, whole: bool) -> list[float]:
    """Values from low to high in equal ratios; every whole number where there are not more, for GPUs.

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


def _point(profile: Profile, value: float, cluster_at: ClusterAt, question: Question) -> Point:
    try:
        plan = question.solve(profile, cluster_at(value))
    except InfeasibleError as error:
        return Point(value=value, config=None, why_not=error.message)
    return _of_plan(value, plan)


def _of_plan(value: float, plan: Plan) -> Point:
    predicted = plan.predicted
    return Point(
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


def _changes(low: Point, high: Point, quantity: Quantity, at: Callable[[float], Point]) -> list[Change]:
    """The changes from one point to the next, each found by bisection from the one before it."""
    found: list[Change] = []
    while low.config != high.config and len(found) < MOST_CHANGES:
        below, above = low, high
        while not _neighbours(below.value, above.value, quantity):
            middle = at(_middle(below.value, above.value, quantity))
            below, above = (middle, above) if middle.config == low.config else (below, middle)
        found.append(Change(below=below.value, from_config=below.config, above=above))
        low = above
    return found


def _neighbours(low: float, high: float, quantity: Quantity) -> bool:
    return high - low <= 1 if quantity == "gpus" else high <= low * (1 + PRECISION)


def _middle(low: float, high: float, quantity: Quantity) -> float:
    middle = math.sqrt(low * high)
    return middle if quantity == "bandwidth" else float(min(max(math.floor(middle), math.floor(low) + 1), high - 1))
