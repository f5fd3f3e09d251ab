"""How many units a 1f1b stage must have in flight to be as fast as its busiest resource allows.

The published depth, d_s = ceil(sum_{t>=s} r_t / r_s) (NOAM, SOSP'19), keeps all workers busy when messages take no time
and replicas never wait for each other. Messages do take time, and the replicas of a stage wait for each other in
every round, so that pipeline can run dry: simulated with equal work per worker and free links, 2-1-1 takes 1.5
times and 4-3-1 2.2 times as long as its busiest worker. A few more minibatches in flight at the first stages cure that,
at the price of that many more weight versions and updates of delay.

In a steady state without idle workers, the r_s * d_s minibatches that a stage has outstanding are those of the next
stage, one per replica, those that wait for the round to end, and those on the wire:

    r_s * d_s  >=  r_{s+1} * d_{s+1}  +  r_s  +  (r_s - 1)  +  transfers / T

That is where the choice starts; the simulator of the streams decides.

1f1b-flush has the same depths, and waits for every message in every microbatch. More in flight cost it only the memory
of their activations: nothing is updated meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price, stage_memory
from planner.cost.rounding import SLACK
from planner.formats.cluster import Cluster
from planner.formats.plan import StageMemory
from planner.schedule.flush import FLUSH
from planner.schedule.one_forward_one_backward import ONE_F_ONE_B
from planner.schedule.schedule import Schedule, warm_up_depths
from planner.simulator.pipeline_costs import PipelineCosts
from planner.solver.candidates.budget import Tally
from planner.solver.candidates.pipelines import pipeline_for, wires_s

Depths = tuple[int, ...]
DepthRule = Literal["auto", "published"]

TOLERANCE = 0.01  # a pipeline this close to its busiest resource is not deepened: timings are no better
UNLIMITED = 2**30
FAR = 1.5  # what deepening beyond the count at the top of this file does not gain
NEAR = 1.1  # the same of going still deeper, or less deep
RESERVED = 0.5  # of what may be simulated, for other pipelines than the one that is being deepened
HARDLY = 0.005  # where all stages deeper gain no more than this, the first few do not either
WORTH = 0.02  # what a minibatch more in flight at the first stage must gain, as a part of the time


@dataclass(frozen=True)
class PipelineTimes:
    """What a depth depends on.

    Args:
        pipeline: of the stages, at any depths.
        wires_s: seconds of a unit's messages, there and back, by (source, target) stage.
        busiest_s: busy seconds per unit of the busiest resource: no depth is faster.
        deepest: per stage, the most units in flight that memory and schedule allow.
        tally: of what may be simulated.
    """

    pipeline: PipelineCosts
    wires_s: Mapping[tuple[int, int], float]
    busiest_s: float
    deepest: Depths
    tally: Tally = field(default_factory=Tally.unlimited)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Per stage."""
        return tuple(len(ranks) for ranks in self.pipeline.shape.ranks)


@dataclass(frozen=True)
class DepthChoice:
    """Depths per stage, and the seconds per unit that the simulation has with them.

    `counted_s`: the same less `TOLERANCE` of it where that is waiting, by which depths are compared.
    """

    depths: Depths
    seconds_per_unit: float
    counted_s: float


def price_with_depths(
    layer_costs: LayerCosts,
    stages: Sequence[Candidate],
    cluster: Cluster,
    price: Price,
    rule: DepthRule,
    schedule: Schedule = ONE_F_ONE_B,
    microbatches: int = 1,
    below_s: float = math.inf,
    tally: Tally | None = None,
) -> Price:
    """`price` with the depths of `rule`: their memory, and the seconds of the simulation; as it is where there is none.

    Args:
        price: of the stages at the published depths, by the resource model, which sees no waiting.
        rule: "published", or "auto" to go deeper where that pays and memory allows it.
        schedule: asynchronous.
        microbatches: per minibatch.
        below_s: whether the plan can be this fast is all that matters: one that is far from it is not deepened.
        tally: of what may be simulated; without a limit when None.
    """
    pipeline = pipeline_for(layer_costs, stages, cluster, price, schedule, microbatches)
    times = PipelineTimes(
        pipeline=pipeline,
        wires_s=wires_s(pipeline),
        busiest_s=price.bottleneck.busy_s / microbatches,
        deepest=_deepest_of(layer_costs, stages, cluster, price.in_flight, schedule, microbatches),
        tally=tally or Tally.unlimited(),
    )
    if rule == "auto":
        choice = choose_depths(times, below_s / microbatches)
    else:
        choice = price_depths(times, price.in_flight, needed=math.isinf(below_s))
    if choice is None:
        return price
    memory = _memory_at(layer_costs, stages, choice.depths, schedule, microbatches)
    return replace(price.simulated(choice.seconds_per_unit * microbatches), in_flight=choice.depths, memory=memory)


def price_with_flush_depths(
    layer_costs: LayerCosts,
    stages: Sequence[Candidate],
    cluster: Cluster,
    price: Price,
    rule: DepthRule,
    microbatches: int,
    below_s: float = math.inf,
    tally: Tally | None = None,
) -> Price:
    """`price` of a 1f1b-flush plan by simulation, deeper where messages would be waited for and memory allows it.

    As it is where there is no simulation.

    Args:
        price: of the stages at the published depths, by the resource model.
        rule: "published" to stay at those.
        microbatches: per minibatch.
        below_s: whether the plan can be this fast is all that matters.
        tally: of what may be simulated; without a limit when None.
    """
    tally = tally or Tally.unlimited()
    pipeline = pipeline_for(layer_costs, stages, cluster, price, FLUSH, microbatches)
    published_s = tally.steady_s(pipeline, needed=math.isinf(below_s))
    if published_s is None:
        return price
    best, best_s = price.in_flight, published_s
    wanted = _hiding_depths(pipeline, price, microbatches)
    if rule == "auto" and best_s <= below_s * FAR and wanted != best:
        deeper = tuple(map(min, wanted, _deepest_of(layer_costs, stages, cluster, best, FLUSH, microbatches)))
        at_deeper = replace(pipeline, shape=replace(pipeline.shape, depths=deeper))
        deeper_s = tally.steady_s(at_deeper) if deeper != best else None
        if deeper_s is not None and deeper_s < best_s * (1 - HARDLY * (deeper[0] - best[0])):
            best, best_s = deeper, deeper_s
    memory = _memory_at(layer_costs, stages, best, FLUSH, microbatches)
    return replace(price.simulated(best_s), in_flight=best, memory=memory)


def _hiding_depths(pipeline: PipelineCosts, price: Price, microbatches: int) -> Depths:
    """Depths at which the stages before a boundary compute while a microbatch's messages cross it, there and back.

    Forwards and backwards take turns, so each boundary takes whole microbatches.
    """
    unit_s = price.bottleneck.busy_s / microbatches
    if unit_s <= 0:
        return price.in_flight
    wires = wires_s(pipeline)
    more, depths = 0, list(price.in_flight)
    for stage in reversed(range(len(depths) - 1)):
        away_s = sum(seconds for (source, target), seconds in wires.items() if source <= stage < target)
        more += math.ceil(away_s / unit_s)
        depths[stage] += math.ceil(more / len(pipeline.shape.ranks[stage]))
    return tuple(depths)


def _memory_at(
    layer_costs: LayerCosts, stages: Sequence[Candidate], depths: Depths, schedule: Schedule, microbatches: int
) -> tuple[StageMemory, ...]:
    """What a replica of each stage holds at these depths."""
    return tuple(
        stage_memory(layer_costs.footprint(stage).divided(microbatches), depth, schedule.versions(depth))
        for stage, depth in zip(stages, depths, strict=True)
    )


def _deepest_of(
    layer_costs: LayerCosts,
    stages: Sequence[Candidate],
    cluster: Cluster,
    at_least: Depths,
    schedule: Schedule,
    microbatches: int,
) -> Depths:
    """Per stage, the most units that may be in flight, and no fewer than `at_least`."""
    return tuple(
        max(depth, _deepest(layer_costs, stage, cluster.memory_of(stage.options.kind), schedule, microbatches))
        for stage, depth in zip(stages, at_least, strict=True)
    )


def _deepest(
    layer_costs: LayerCosts, stage: Candidate, memory_bytes: int | None, schedule: Schedule, microbatches: int
) -> int:
    """The most units in flight that memory, the schedule's versions of the weights and the minibatch allow."""
    depth = schedule.deepest(stage.replicas, microbatches) or UNLIMITED
    if memory_bytes is None:
        return depth
    footprint = layer_costs.footprint(stage).divided(microbatches)
    stashing, versions = schedule.stashes, schedule.weight_versions
    return min(depth, int(footprint.most_in_flight(memory_bytes, stashing=stashing, versions=versions)))


def published_depths(replicas: Sequence[int]) -> Depths:
    """NOAM for every stage."""
    return warm_up_depths(replicas)


def price_depths(times: PipelineTimes, depths: Depths, *, needed: bool = False) -> DepthChoice | None:
    """Seconds per unit of given depths, by simulation of the streams; None where the tally does not allow it.

    `needed`: there is nothing else to go by.
    """
    shape = replace(times.pipeline.shape, depths=depths)
    minibatch_s = times.tally.steady_s(replace(times.pipeline, shape=shape), needed=needed)
    if minibatch_s is None:
        return None
    # A pipeline that does not repeat itself within the run can seem a little faster than its busiest resource allows.
    seconds = max(times.busiest_s, minibatch_s / shape.microbatches)
    return DepthChoice(depths, seconds, max(times.busiest_s, seconds / (1 + TOLERANCE)))


def choose_depths(times: PipelineTimes, below_s: float = math.inf) -> DepthChoice | None:
    """The published depths, or deeper ones where every minibatch more in flight gains at least `WORTH`.

    Args:
        times: of the pipeline.
        below_s: a time that the pipeline has to reach; where the counted depths are `FAR` from it, they are all.

    Returns:
        None where the tally does not even allow to simulate the published depths.
    """
    published = published_depths(times.replicas)
    first = price_depths(times, published, needed=math.isinf(below_s))
    if first is None:
        return None
    best, trimmed = first, True
    tried: dict[Depths, DepthChoice | None] = {published: first}
    reserved = times.tally.left * RESERVED

    def consider(candidate: Depths) -> float:
        """How much of the time is gained by it."""
        nonlocal best, trimmed
        depths = tuple(map(min, candidate, times.deepest))
        at_best = DepthChoice(depths, times.busiest_s, times.busiest_s)
        if best.counted_s <= times.busiest_s or not _better(at_best, best, published):
            return 0.0  # however fast it is
        if depths not in tried and times.tally.left < reserved:
            times.tally.exhausted = False
            return 0.0
        if depths not in tried:
            tried[depths] = price_depths(times, depths)
        before, deeper = best.counted_s, tried[depths]
        if deeper is None:
            return 0.0
        if _better(deeper, best, published):
            best, trimmed = deeper, False
        return 1 - deeper.counted_s / before

    counted, last = _counted_depths(times), len(times.replicas) - 1
    consider(counted)
    if best.counted_s <= below_s * FAR:
        gained = consider(_more(counted, 1, last))
        if gained > HARDLY and best.counted_s <= below_s * NEAR:
            # For long pipelines, whose simulation is slow, the first stage or all.
            for upto in range(1, last) if last < 8 else (1,):
                consider(_more(counted, 1, upto))
        consider(_more(counted, 2, last))
        if best.counted_s <= below_s * NEAR:
            consider(_counted_depths(times, more=1))
    return best if trimmed or best.counted_s > below_s else _trimmed(times, best)


def _more(depths: Depths, more: int, upto: int) -> Depths:
    """That many more at the first stages."""
    return tuple(depth + more * (stage < upto) for stage, depth in enumerate(depths))


def _better(deeper: DepthChoice, best: DepthChoice, published: Depths) -> bool:
    one, other = _regret(deeper, published), _regret(best, published)
    alike = abs(one - other) <= SLACK * other
    return sum(deeper.depths) < sum(best.depths) if alike else one < other


def _regret(choice: DepthChoice, published: Depths) -> float:
    return choice.counted_s * (1 + WORTH * (choice.depths[0] - published[0]))


def _trimmed(times: PipelineTimes, best: DepthChoice) -> DepthChoice:
    """Take back what is in flight for nothing at the first stage, which has the most."""
    low, high = published_depths(times.replicas)[0], best.depths[0]
    while low < high:
        middle = (low + high) // 2
        less = price_depths(times, (middle, *best.depths[1:]))
        if less is None:
            break
        if less.counted_s > best.counted_s:
            low = middle + 1
        else:
            best, high = less, middle
    return best


def _counted_depths(times: PipelineTimes, more: int = 0) -> Depths:
    """The inequality at the top of this file, from the last stage to the first, and `more` at every stage but that."""
    replicas, published = times.replicas, published_depths(times.replicas)
    depths = [1]
    outstanding = 2.0 * replicas[-1] - 1
    for stage in reversed(range(len(replicas) - 1)):
        own_s = times.pipeline.stages[stage].compute_s
        wire_s = sum(seconds for (source, target), seconds in times.wires_s.items() if source <= stage < target)
        outstanding += min(own_s / times.busiest_s, replicas[stage]) + replicas[stage] - 1 + wire_s / times.busiest_s
        depth = math.ceil(outstanding / replicas[stage] * (1 - TOLERANCE))
        depths.append(max(depth, published[stage]) + more)
        outstanding = float(depths[-1] * replicas[stage])
    return tuple(reversed(depths))
