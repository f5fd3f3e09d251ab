"""Sweep one quantity of the cluster: how the plan changes with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from planner.analysis.compare import DATA_PARALLEL, ONE_GPU, with_baselines
from planner.arguments import checked
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import Cluster, Level
from planner.formats.files import Record
from planner.formats.link_names import link_bandwidth
from planner.formats.plan import Plan
from planner.formats.plan_parts import Bottleneck
from planner.formats.profile import Profile
from planner.formats.shown import Shown
from planner.options.solving import SolveOptions
from planner.solver.find_plan import find_plan
from planner.solver.problem.budget import Patience
from planner.units import parse_bytes


def at_bandwidth(level: Level, bandwidth_bytes_per_s: float) -> Level:
    """Return the level with another bandwidth; those measured of all-reduces keep their ratios to it."""
    factor = bandwidth_bytes_per_s / level.bandwidth_bytes_per_s
    names = ("all_reduce_bandwidth_bytes_per_s", "sum_bandwidth_bytes_per_s")
    scaled = {name: rate * factor for name in names if (rate := getattr(level, name)) is not None}
    return level.model_copy(update={"bandwidth_bytes_per_s": bandwidth_bytes_per_s, **scaled})


Quantity = Literal["bandwidth", "gpus", "memory"]
_UNITS: Mapping[Quantity, Callable[[str], float]] = {"bandwidth": link_bandwidth, "gpus": int, "memory": parse_bytes}
ClusterAt = Callable[[float], Cluster]

MOST_POINTS = 200
_SPEEDS = ("samples_per_s", "speedup_over_one_gpu", "speedup_over_data_parallel")
_PREDICTED = ("seconds_per_minibatch", *_SPEEDS, "bottleneck")  # fields that a point has of its plan


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
    one_gpu_over_memory_bytes: int = 0  # by how much that exceeds the memory; 0 if it fits
    data_parallel_over_memory_bytes: int = 0
    bottleneck: Bottleneck | None = None
    why_not: str | None = None  # if no plan fits

    @property
    def rate_per_s(self) -> float:
        """Samples per second, or microbatches where their size is not known; 0 if no plan fits."""
        if self.seconds_per_minibatch is None:
            return 0.0
        return self.samples_per_s or (self.microbatches or 1) / self.seconds_per_minibatch


class Sweep(Shown, Record):
    """The plans for some values of a quantity, in ascending order."""

    model: str
    quantity: Quantity
    points: tuple[SweepPoint, ...]


@checked
def sweep(
    profile: Profile,
    quantity: Quantity,
    values: Sequence[float | str],
    cluster_at: ClusterAt,
    *,
    options: SolveOptions | None = None,
    patience: Patience | None = None,
) -> Sweep:
    """Solve for each value in ascending order.

    Args:
        profile: costs per layer.
        quantity: what the values are: bytes/s, a number of GPUs, or bytes of memory per GPU.
        values: see `spread`.
        cluster_at: returns the cluster with a value.
        options: how to solve; by default as `solve` does.
        patience: how long all searches may take together.

    Raises:
        InfeasibleError: when no plan fits for any value, with the reason for the largest.

    Example:
        >>> profile = planner.load_profile("profiles/vgg16/cpu.json")
        >>> found = planner.sweep(profile, "gpus", [2, 4], lambda gpus: planner.flat_cluster(int(gpus), 125e6))
        >>> [point.config for point in found.points]
        ['1-1', '2-1-1']
    """
    options = options or SolveOptions()
    places = sorted({_UNITS[quantity](value) if isinstance(value, str) else value for value in values})
    patience = patience or Patience.of(options.time_limit_s, options.progress)
    left_s = patience.deadline.left_s
    # All have the same time, so that no config changes because one had more.
    each_s = None if left_s is None else left_s / len(places)
    points = list[SweepPoint]()
    refused: InfeasibleError | None = None
    for value in places:
        try:
            plan = find_plan(profile, cluster_at(value), options, patience.at_most(each_s))
        except InfeasibleError as error:
            refused = error
            points.append(SweepPoint(value=value, config=None, why_not=error.message))
            continue
        points.append(_point(value, with_baselines(profile, plan, Patience.of(0.0))))
    if refused is not None and all(point.config is None for point in points):
        message = f"at no point of the sweep does a plan fit; at the last, {refused.message}"
        raise InfeasibleError(message, hint=refused.hint)
    return Sweep(model=profile.model, quantity=quantity, points=tuple(points))


def _point(value: float, plan: Plan) -> SweepPoint:
    return SweepPoint(
        value=value,
        config=plan.config,
        workers=plan.workers,
        microbatches=plan.microbatches,
        one_gpu_over_memory_bytes=plan.over_memory_bytes(ONE_GPU),
        data_parallel_over_memory_bytes=plan.over_memory_bytes(DATA_PARALLEL),
        **{name: getattr(plan.predicted, name) for name in _PREDICTED},
    )


def spread(low: float, high: float, points: int, whole: bool) -> list[float]:
    """Spread values from `low` to `high` in equal ratios; `whole` numbers only, all of them if `points` suffice."""
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
