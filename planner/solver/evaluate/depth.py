"""Choose how many units each stage has in flight, so that a 1F1B pipeline is as fast as its busiest resource allows.

The published depth, d_s = ceil(sum_{t>=s} r_t / r_s) (NOAM, SOSP'19), keeps all workers busy when messages take no time
and replicas never wait for each other. Messages do take time, and the replicas of a stage wait for each other in
every round, so the pipeline can run dry: simulated with equal work per worker and free links, 2-1-1 takes 1.5
times and 4-3-1 2.2 times as long as its busiest worker. A few more minibatches in flight at the first stages cure that.
They cost as many weight versions and updates of delay.

In a steady state without idle workers, the r_s * d_s minibatches that a stage has outstanding are those of the next
stage, one per replica, those that wait for the round to end, and those on the wire:

    r_s * d_s  >=  r_{s+1} * d_{s+1}  +  r_s  +  (r_s - 1)  +  transfers / T

The choice starts from the depths that this inequality gives; simulating the streams decides. First it is by time alone,
and of equally fast depths the shallowest. Then, under 1f1b, each update that gradients are later has to make the
pipeline `LATER` times as fast, so that a better cluster, on which it gains less than that, may have the slower plan.
`max_staleness` and the memory bound the depth.

1f1b-flush has the same published depths, and waits for every message of every microbatch. Deeper pipelines cost it only
the memory of more activations, because nothing is updated meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from planner.schedule.schedule import warm_up_depths
from planner.simulator.pipeline_costs import PipelineCosts
from planner.solver.evaluate.pipelines import wires_s
from planner.solver.problem.budget import LATER, Budget
from planner.units import SLACK

Depths = tuple[int, ...]

TOLERANCE = 0.01  # a plan this close to the bound counts as optimal: timings are no better
HOPELESS = 1.25  # ratio of times that deepening beyond the inequality at the top of this file does not gain
FAR = 1.5  # likewise under synchronous schedules
HARDLY = 0.005  # if all stages one deeper gain no more than this, the first few stages do not either
NEAR = 1.1  # ratio of times that going still deeper, or less deep, does not gain
RESERVED = 0.5  # share of the budget that is kept for other pipelines than the one that is being deepened


@dataclass(frozen=True)
class PipelineTimes:
    """What the choice of depths depends on.

    Args:
        pipeline: its stages, at any depths.
        busiest_s: busy seconds per unit of the busiest resource: no depth is faster.
        deepest: per stage, the most units in flight that memory and schedule allow.
        budget: of the search.
    """

    pipeline: PipelineCosts
    busiest_s: float
    deepest: Depths
    budget: Budget = field(default_factory=Budget.unlimited)

    @cached_property
    def crossing_s(self) -> list[float]:
        """Seconds of a unit's messages, both ways, over the boundary behind each stage."""
        return _crossing_s(self.pipeline)


@dataclass(frozen=True)
class DepthChoice:
    """Depths per stage, and the simulated seconds per unit."""

    depths: Depths
    seconds_per_unit: float


def hiding_depths(pipeline: PipelineCosts, published: Depths, unit_s: float) -> Depths:
    """Return depths at which the stages before a boundary compute while a microbatch's messages cross it, both ways.

    Forwards and backwards take turns, so each boundary needs whole microbatches more.

    Args:
        pipeline: of a synchronous schedule.
        published: depths that are enough if messages take no time.
        unit_s: seconds that the busiest resource takes per microbatch.
    """
    if unit_s <= 0:
        return published
    crossing_s, more, depths = _crossing_s(pipeline), 0, list(published)
    for stage in reversed(range(len(depths) - 1)):
        more += math.ceil(crossing_s[stage] / unit_s)
        depths[stage] += math.ceil(more / len(pipeline.shape.ranks[stage]))
    return tuple(depths)


def _crossing_s(pipeline: PipelineCosts) -> list[float]:
    wires = wires_s(pipeline)
    return [
        sum(seconds for (source, target), seconds in wires.items() if source <= stage < target)
        for stage in range(len(pipeline.shape.ranks))
    ]


def price_depths(
    times: PipelineTimes, depths: Depths, *, needed: bool = False, hopeless_s: float = math.inf
) -> DepthChoice | None:
    """Simulate given depths, or return None if the budget does not allow it.

    `needed`, `hopeless_s`, here per unit: see `Budget.steady_s`.
    """
    shape = replace(times.pipeline.shape, depths=depths)
    hopeless_s *= shape.microbatches
    minibatch_s = times.budget.steady_s(replace(times.pipeline, shape=shape), needed=needed, hopeless_s=hopeless_s)
    if minibatch_s is None:
        return None
    # A pipeline that does not repeat itself within the run can seem a little faster than its busiest resource allows.
    return DepthChoice(depths, max(times.busiest_s, minibatch_s / shape.microbatches))


def choose_depths(times: PipelineTimes, below_s: float = math.inf) -> DepthChoice | None:
    """Choose the published depths, or deeper ones: those of least time, as far as each update of lateness earns it.

    Args:
        times: of the pipeline.
        below_s: seconds per unit that the pipeline has to reach. If the depths of the inequality are `HOPELESS` from
            it, no others are tried; nor if more in flight at each stage leaves it farther than `NEAR`.

    Returns:
        None if the budget does not even allow to simulate the published depths.
    """
    published, counted = warm_up_depths(times.pipeline.shape.replicas), _counted_depths(times)
    # The inequality is usually enough, and what is far from `below_s` with it needs no other simulation.
    counted = tuple(map(min, counted, times.deepest))
    begin = published if math.isinf(below_s) else counted
    best = price_depths(times, begin, needed=math.isinf(below_s), hopeless_s=below_s * HOPELESS)
    if best is None or best.seconds_per_unit > below_s * HOPELESS:
        return best
    tried: dict[Depths, DepthChoice | None] = {begin: best}
    # One pipeline with many depths to try must not use up what other candidates need.
    reserved = times.budget.left * RESERVED

    def consider(wanted: Depths) -> float:
        """Simulate a candidate, keep it if it is better, and return the share of the time that it gains."""
        nonlocal best
        assert best is not None
        depths = tuple(map(min, wanted, times.deepest))
        if best.seconds_per_unit <= times.busiest_s * (1 + SLACK):
            return 0.0  # no depth is faster
        if depths not in tried and times.budget.left < reserved:
            times.budget.exhausted = False
            return 0.0
        if depths not in tried:
            tried[depths] = price_depths(times, depths)
        if (choice := tried[depths]) is None:
            return 0.0
        before_s, seconds = best.seconds_per_unit, choice.seconds_per_unit
        # Equals within rounding go to the one with fewer units in flight.
        alike = abs(seconds - before_s) <= SLACK * before_s
        if sum(depths) < sum(best.depths) if alike else seconds < before_s:
            best = choice
        return 1 - seconds / before_s

    consider(counted)
    consider(_counted_depths(times, more=1))
    if best.seconds_per_unit > below_s * NEAR:
        return best
    last = len(published) - 1
    if consider(_deeper(counted, 1, last)) > HARDLY:
        # Long pipelines are slow to simulate: for those, deepen only the first stage or all.
        for upto in range(1, last) if last < 8 else (1,):
            consider(_deeper(counted, 1, upto))
    consider(_deeper(counted, 2, last))
    consider(published)
    if best.depths == published or best.seconds_per_unit > below_s:
        return best
    # Reduce the depth of the first stage, which has most in flight, as far as that costs no time. By bisection, because
    # the time falls with the depth; only the first stage, to keep the number of simulations small.
    low, high = published[0], best.depths[0]
    while low < high:
        middle = (low + high) // 2
        less = price_depths(times, (middle, *best.depths[1:]))
        if less is None:
            break
        if less.seconds_per_unit > best.seconds_per_unit * (1 + SLACK):
            low = middle + 1
        else:
            best, high = less, middle
    return _earned(times, published, best)


def _earned(times: PipelineTimes, published: Depths, fastest: DepthChoice) -> DepthChoice:
    """Return the depths between the published and the fastest ones whose lateness is earned by their speed."""

    def counted_s(seconds: float, depths: Depths) -> float:
        return seconds * float(LATER ** times.pipeline.shape.schedule.staleness(max(depths)))

    best, least_s = fastest, counted_s(fastest.seconds_per_unit, fastest.depths)
    for most in range(max(published), max(fastest.depths)):
        depths = tuple(max(least, min(depth, most)) for least, depth in zip(published, fastest.depths, strict=True))
        if least_s <= counted_s(fastest.seconds_per_unit, depths) * (1 + SLACK):
            break  # these and all that are deeper count more even if they are the fastest
        choice = price_depths(times, depths)
        if choice is not None and counted_s(choice.seconds_per_unit, depths) < least_s * (1 - SLACK):
            best, least_s = choice, counted_s(choice.seconds_per_unit, depths)
    return best


def _deeper(depths: Depths, more: int, upto: int) -> Depths:
    return tuple(depth + more * (stage < upto) for stage, depth in enumerate(depths))


def _counted_depths(times: PipelineTimes, more: int = 0) -> Depths:
    """Solve the inequality at the top of this file from the last stage to the first; `more` for all but the last."""
    replicas = times.pipeline.shape.replicas
    published, depths = warm_up_depths(replicas), [1]
    outstanding = 2.0 * replicas[-1] - 1
    for stage in reversed(range(len(replicas) - 1)):
        own_s, wire_s = times.pipeline.stages[stage].compute_s, times.crossing_s[stage]
        outstanding += min(own_s / times.busiest_s, replicas[stage]) + replicas[stage] - 1 + wire_s / times.busiest_s
        depth = math.ceil(outstanding / replicas[stage] * (1 - TOLERANCE))
        depths.append(max(depth, published[stage]) + more)
        outstanding = float(depths[-1] * replicas[stage])
    return tuple(reversed(depths))
