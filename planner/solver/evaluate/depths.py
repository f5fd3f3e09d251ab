"""Choose the depths of an asynchronous pipeline: how many units each stage has in flight.

The published depths, d_s = ceil(sum_{t>=s} r_t / r_s) (NOAM, SOSP'19), keep all workers busy when
messages take no time and replicas never wait for each other. Simulated with equal work per worker
and free links, 2-1-1 takes 1.5 times and 4-3-1 2.2 times as long as its busiest worker. A few more
minibatches in flight at the first stages cure that, at the price of as many weight versions and
updates of delay. In a steady state without idle workers, the r_s * d_s minibatches that a stage has
outstanding are those of the next stage, one per replica, those that wait for the round to end, and
those on the wire:

    r_s * d_s  >=  r_{s+1} * d_{s+1}  +  min(c_s / T, r_s)  +  (r_s - 1)  +  w_s / T

    r_s, d_s   replicas of stage s, and its depth
    c_s        seconds that a unit computes on stage s; at most r_s units are at work at once
    w_s        seconds of a unit's messages over the boundary behind stage s, both ways
    T          seconds per unit of the busiest resource

Simulating the streams decides among the depths that this inequality gives, those one deeper, and
the published ones. Then each update that gradients are later has to make the pipeline so many times
as fast as `EvaluateTuning.min_speedup_per_stale_update` says.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from planner.schedule.schedule import warm_up_depths
from planner.simulator.pipeline_costs import PipelineCosts
from planner.solver.evaluate.depth_limits import Depths, crossing_s
from planner.solver.problem.budget import Budget
from planner.solver.tuning.record import STANDARD, Tuning
from planner.units import SLACK


@dataclass(frozen=True)
class PipelineTimes:
    """What the choice of depths depends on."""

    pipeline: PipelineCosts  # at any depths
    busiest_s: float  # busy seconds per unit of the busiest resource: no depth is faster
    deepest: Depths  # the most units in flight that memory and schedule allow
    budget: Budget = field(default_factory=Budget.unlimited)
    tuning: Tuning = STANDARD

    @cached_property
    def published(self) -> Depths:
        """The published depths."""
        return warm_up_depths(self.pipeline.shape.replicas)

    @cached_property
    def wire_s(self) -> list[float]:
        """Seconds of a unit's messages over the boundary behind each stage."""
        return crossing_s(self.pipeline)

    def with_lateness_s(self, seconds: float, depths: Depths) -> float:
        """Count seconds a few per cent more for each update that gradients are late."""
        updates = self.pipeline.shape.schedule.staleness(max(depths))
        return seconds * float(self.tuning.evaluate.min_speedup_per_stale_update**updates)


@dataclass(frozen=True)
class DepthChoice:
    """Depths per stage, and the simulated seconds per unit."""

    depths: Depths
    seconds_per_unit: float

    def beats(self, other: "DepthChoice") -> bool:
        """Return whether this is faster, or equal within rounding with fewer units in flight."""
        difference_s = self.seconds_per_unit - other.seconds_per_unit
        if abs(difference_s) <= SLACK * other.seconds_per_unit:
            return sum(self.depths) < sum(other.depths)
        return difference_s < 0


def choose_depths(times: PipelineTimes, below_s: float = math.inf) -> DepthChoice | None:
    """Choose the depths of least time, as far as each update of lateness earns it.

    Args:
        times: the pipeline, whose budget is spent.
        below_s: seconds per unit that the pipeline has to reach. If it is far from them, no other
            depths are tried. Where infinite, a time is needed, and only the deadline ends the
            simulation.

    Returns:
        None if the budget does not even allow to simulate the first depths.
    """
    needed = math.isinf(below_s)
    hopeless_s = below_s * times.tuning.depths.max_gain_of_more

    # 1. The inequality is usually enough: what is far from `below_s` with it needs no other
    # simulation.
    first = times.published if needed else _counted_depths(times)
    choice = price_depths(times, first, needed=needed, hopeless_s=hopeless_s)
    if choice is None or choice.seconds_per_unit > hopeless_s:
        return choice

    # 2. Other depths may be faster, and 3. fewer units in flight nearly as fast.
    fastest = _fastest_depths(times, choice, below_s)
    if fastest.seconds_per_unit > below_s:
        return fastest
    return _earned_depths(times, fastest)


def price_depths(
    times: PipelineTimes,
    depths: Depths,
    *,
    needed: bool = False,
    hopeless_s: float = math.inf,
) -> DepthChoice | None:
    """Simulate these depths, or return None if the budget does not allow it.

    `needed` and `hopeless_s`, here per unit: see `Budget.steady_s`.
    """
    pipeline = times.pipeline.with_depths(depths)
    microbatches = pipeline.shape.microbatches
    minibatch_s = times.budget.steady_s(
        pipeline,
        needed=needed,
        hopeless_s=hopeless_s * microbatches,
    )

    if minibatch_s is None:
        return None

    # A pipeline that does not repeat itself within the run can seem a little faster than its
    # busiest resource allows.
    return DepthChoice(depths, max(times.busiest_s, minibatch_s / microbatches))


def _fastest_depths(times: PipelineTimes, best: DepthChoice, below_s: float) -> DepthChoice:
    """Simulate the depths that may be faster than the first ones, and return the fastest."""
    budget = times.budget
    tried = {best.depths}

    # One pipeline with many depths to try must not use up what other candidates need.
    reserved = budget.left * times.tuning.depths.reserved_share
    hopeless_s = below_s * times.tuning.depths.max_gain_of_less

    for depths in _promising_depths(times):
        if best.seconds_per_unit <= times.busiest_s * (1 + SLACK):
            break  # no depth is faster
        if depths in tried:
            continue
        if depths == times.published and best.seconds_per_unit > hopeless_s:
            continue
        if budget.left < reserved:
            budget.exhausted = False
            break

        tried.add(depths)
        choice = price_depths(times, depths)
        if choice is not None and choice.beats(best):
            best = choice

    return best


def _promising_depths(times: PipelineTimes) -> Iterator[Depths]:
    """Yield the depths of the inequality, deeper ones, and the published ones."""
    counted = _counted_depths(times)
    yield counted
    yield _counted_depths(times, more=1)
    for more in (1, 2):
        deeper = [depth + more for depth in counted[:-1]]
        yield _within([*deeper, 1], times.deepest)

    yield times.published


def _counted_depths(times: PipelineTimes, more: int = 0) -> Depths:
    """Solve the inequality at the top of this file from the last stage to the first.

    All stages but the last are `more` units deeper, and those before them count with these.
    """
    replicas = times.pipeline.shape.replicas
    unit_s = times.busiest_s
    slack = 1 - times.tuning.evaluate.timing_share
    depths = [1]
    outstanding = 2.0 * replicas[-1] - 1

    for stage in reversed(range(len(replicas) - 1)):
        count = replicas[stage]
        at_work = min(times.pipeline.stages[stage].compute_s / unit_s, count)
        outstanding += at_work + count - 1 + times.wire_s[stage] / unit_s

        depth = math.ceil(outstanding / count * slack)
        depth = max(depth, times.published[stage]) + more
        depths.append(depth)
        outstanding = float(depth * count)

    depths.reverse()
    return _within(depths, times.deepest)


def _within(depths: list[int], deepest: Depths) -> Depths:
    return tuple(map(min, depths, deepest))


def _earned_depths(times: PipelineTimes, fastest: DepthChoice) -> DepthChoice:
    """Return the depths from the published to the fastest ones whose lateness their speed earns."""
    best = fastest
    least_s = times.with_lateness_s(fastest.seconds_per_unit, fastest.depths)

    for most in range(max(times.published), max(fastest.depths)):
        depths = _limited(fastest.depths, times.published, most)
        ideal_s = times.with_lateness_s(fastest.seconds_per_unit, depths)
        if best is not fastest and least_s <= ideal_s * (1 + SLACK):
            break  # these and all that are deeper count more even if they are the fastest

        choice = price_depths(times, depths)
        if choice is None:
            continue

        # Of those that count alike the first is the shallowest.
        enough_s = least_s * (1 - SLACK)
        if best is fastest:
            enough_s = least_s * (1 + SLACK)
        seconds = times.with_lateness_s(choice.seconds_per_unit, depths)
        if seconds <= enough_s:
            best = choice
            least_s = seconds

    return best


def _limited(depths: Depths, published: Depths, most: int) -> Depths:
    """Return the depths, none above `most` but where the published one is."""
    limited = (min(depth, most) for depth in depths)
    return tuple(map(max, limited, published))
