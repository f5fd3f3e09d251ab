"""Sweep one quantity of the cluster: how the plan changes with it, and where."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planner.analysis.compare import DATA_PARALLEL, ONE_GPU, with_baselines
from planner.analysis.given_plan import GivenPlan, missing_memory, options_of
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


def bandwidth_sweep(
    profile: Profile, plan: Plan, points: int, factor: float, patience: Patience | None = None
) -> "Sweep":
    """Solve for bandwidths of the outermost level, from a `factor`-th of the plan's to `factor` times as much."""
    levels = plan.cluster.levels
    outermost = max((n for n, level in enumerate(levels) if level.size > 1), default=0)
    now = levels[outermost].bandwidth_bytes_per_s

    def at(bandwidth_bytes_per_s: float) -> Cluster:
        changed = at_bandwidth(levels[outermost], bandwidth_bytes_per_s)
        return plan.cluster.model_copy(update={"levels": (*levels[:outermost], changed, *levels[outermost + 1 :])})

    values = spread(now / factor, now * factor, points, whole=False)
    return sweep(profile, "bandwidth", values, at, options=options_of(plan), patience=patience)


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
WORTH = 0.01  # of the time that another config has to save before it takes the place of the one before
PRECISION = 0.01  # relative, of the values at which the config changes
MOST_CHANGES = 8  # to look for between two adjacent points
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


class ConfigChange(Record):
    """A change of config between two values, which are within `PRECISION` or adjacent integers."""

    below: float
    from_config: str | None
    above: SweepPoint  # the first with another config


class Sweep(Shown, Record):
    """Points in ascending order of the quantity, and the changes of config found between them."""

    model: str
    quantity: Quantity
    points: tuple[SweepPoint, ...]
    changes: tuple[ConfigChange, ...]
    out_of_time: bool = False  # the time limit passed before each change was within `PRECISION`


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
    """Solve for each value in ascending order, and bisect between adjacent values whose configs differ.

    A config stays until another is faster by more than `WORTH`, or until it does not fit.

    Args:
        profile: costs per layer.
        quantity: what the values are: bytes/s, a number of GPUs, or bytes of memory per GPU.
        values: see `spread`.
        cluster_at: returns the cluster with a value.
        options: how to solve; by default as `solve` does.
        patience: how long all searches may take together. When the time is over, changes are told less precisely.

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
    # All have the same time, so that no config changes because one had more; half of it is for these values.
    points_of = _Points(profile, cluster_at, options, patience, None if left_s is None else left_s / (2 * len(places)))
    for value in places:
        answer = points_of.solve(value)
    if isinstance(answer, InfeasibleError) and not any(isinstance(each, Plan) for each in points_of.solved.values()):
        message = f"at no point of the sweep does a plan fit; at the last, {answer.message}"
        raise InfeasibleError(message, hint=answer.hint)
    points, changes = [points_of.at(places[0], None)], list[ConfigChange]()
    for value in places[1:]:
        low, high = points[-1], points_of.at(value, points[-1].config)
        for _ in range(MOST_CHANGES):
            if low.config == high.config:
                break
            changes.append(_change(points_of, low, high, quantity))
            low = changes[-1].above
            high = points_of.at(value, low.config)
        points.append(high)
    return Sweep(
        model=profile.model,
        quantity=quantity,
        points=tuple(points),
        changes=tuple(changes),
        out_of_time=not points_of.time_left,
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


@dataclass(frozen=True)
class _Points:
    """Solves for values; remembers what it solved, and per config the last plan."""

    profile: Profile
    cluster_at: ClusterAt
    options: SolveOptions
    patience: Patience
    each_s: float | None  # for each value; None without a limit
    solved: dict[float, Plan | InfeasibleError] = field(default_factory=dict)
    last: dict[str, Plan] = field(default_factory=dict)

    @property
    def time_left(self) -> bool:
        return self.each_s is None or (self.patience.deadline.left_s or 0.0) > self.each_s

    def solve(self, value: float) -> Plan | InfeasibleError:
        if value not in self.solved:
            patience = self.patience.at_most(self.each_s)
            try:
                self.solved[value] = find_plan(self.profile, self.cluster_at(value), self.options, patience)
            except InfeasibleError as error:
                self.solved[value] = error
        return self.solved[value]

    def at(self, value: float, config: str | None) -> SweepPoint:
        """Return the point of a value, with the plan of this config where no other is worth a change."""
        best = self.solve(value)
        if isinstance(best, InfeasibleError):
            return SweepPoint(value=value, config=None, why_not=best.message)
        before = self.last.get(config or "")
        plan = best if before is None or config == best.config else self._kept(before, best)
        self.last[plan.config] = plan
        plan = with_baselines(self.profile, plan, Patience.of(0.0))
        return SweepPoint(
            value=value,
            config=plan.config,
            workers=plan.workers,
            microbatches=plan.microbatches,
            one_gpu_over_memory_bytes=plan.over_memory_bytes(ONE_GPU),
            data_parallel_over_memory_bytes=plan.over_memory_bytes(DATA_PARALLEL),
            **{name: getattr(plan.predicted, name) for name in _PREDICTED},
        )

    def _kept(self, before: Plan, best: Plan) -> Plan:
        """Return the earlier plan on the cluster of the best one, or that one if it is worth a change."""
        if before.workers > best.cluster.gpus:
            return best
        kept = GivenPlan.of(self.profile, before, self.options, self.patience).on(best.cluster)
        like = kept.predicted.by == best.predicted.by
        slower = kept.predicted.seconds_per_minibatch > best.predicted.seconds_per_minibatch * (1 + WORTH)
        return best if slower or not like or missing_memory(kept) else kept


def _change(points_of: _Points, low: SweepPoint, high: SweepPoint, quantity: Quantity) -> ConfigChange:
    """Find by bisection the first change from the config of the lower point."""
    below, above = low, high
    while points_of.time_left:
        least, most = below.value, above.value
        if most - least <= 1 if quantity == "gpus" else most <= least * (1 + PRECISION):
            break
        value = math.sqrt(least * most)
        if quantity != "bandwidth":
            value = float(min(max(math.floor(value), math.floor(least) + 1), most - 1))
        middle = points_of.at(value, low.config)
        below, above = (middle, above) if middle.config == low.config else (below, middle)
    return ConfigChange(below=below.value, from_config=below.config, above=above)
