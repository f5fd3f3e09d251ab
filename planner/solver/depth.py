"""How many minibatches a 1f1b stage must have in flight to be as fast as its busiest resource allows.

The published depth, d_s = ceil(sum_{t>=s} r_t / r_s) (NOAM, SOSP'19), keeps all workers busy when messages take no time
and replicas never wait for each other. Messages do take time, and the replicas of a stage wait for each other in
every round, so that pipeline can run dry: simulated with equal work per worker and free links, 2-1-1 takes 1.5
times and 4-3-1 2.2 times as long as its busiest worker. A few more minibatches in flight at the first stages cure that,
at the price of that many more weight versions and updates of delay.

In a steady state without idle workers, the r_s * d_s minibatches that a stage has outstanding are those of the next
stage, one per replica, those that wait for the round to end, and those on the wire:

    r_s * d_s  >=  r_{s+1} * d_{s+1}  +  r_s  +  (r_s - 1)  +  transfers / T

That is where the choice starts; the simulator of the streams decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.cluster import Cluster
from planner.cost import Link, backward_and_reduce_s, ring_all_reduce_s
from planner.cost_2bw import VERSIONS
from planner.plan_file import ScheduleName, Transfer
from planner.pricing import Candidate, Ledger, Price, stage_memory, versions_of
from planner.schedule.streams import Channel, PipelineShape, warm_up_depth
from planner.simulator.pipeline import StageTimes, TransferTimes, simulate
from planner.simulator.times import with_handling
from planner.solver.assemble import transfers
from planner.topology import Topology, rank_ranges

Depths = tuple[int, ...]
DepthRule = Literal["auto", "published"]

TOLERANCE = 0.01  # a pipeline this close to its busiest resource counts as fast as that: timings are no better
MOST_WORKERS = 64  # beyond, simulating takes too long: the published depths are kept and their waits not priced
MOST_MICROBATCHES = 2**12  # times workers, for the same reason
UNLIMITED = 2**30
_SIMULATED_MINIBATCHES = 12  # of several microbatches each
FAR = 1.5  # what deepening beyond the count at the top of this file does not gain
WORTH = 0.02  # what a minibatch more in flight at the first stage must gain, as a part of the time


@dataclass(frozen=True)
class PipelineTimes:
    """What a depth depends on.

    Args:
        replicas: per stage.
        stages: seconds per unit (a minibatch, or a microbatch where it is divided), and per round for the all-reduce.
        transfers: by (source, target) stage.
        busiest_s: busy seconds per unit of the busiest resource: no depth is faster.
        deepest: per stage, the most units in flight that memory and schedule allow.
        schedule: "1f1b" or "2bw".
        microbatches: units per minibatch.
    """

    replicas: tuple[int, ...]
    stages: tuple[StageTimes, ...]
    transfers: Mapping[tuple[int, int], TransferTimes]
    busiest_s: float
    deepest: Depths
    schedule: ScheduleName = "1f1b"
    microbatches: int = 1


@dataclass(frozen=True)
class DepthChoice:
    """Depths per stage, and what they give."""

    depths: Depths
    seconds_per_unit: float


def price_with_depths(
    ledger: Ledger,
    stages: Sequence[Candidate],
    cluster: Cluster,
    price: Price,
    rule: DepthRule,
    schedule: ScheduleName = "1f1b",
    microbatches: int = 1,
    below_s: float = math.inf,
) -> Price:
    """`price` with the depths of `rule`: their memory, and seconds that count what they leave the workers waiting.

    Args:
        price: of the stages at the published depths, by the resource model, which sees no waiting.
        rule: "published", or "auto" to go deeper where that pays and memory allows it.
        schedule: "1f1b" or "2bw".
        microbatches: per minibatch.
        below_s: whether the plan can be this fast is all that matters: one that is far from it is not deepened.
    """
    times = pipeline_times(ledger, stages, cluster, price, schedule, microbatches)
    if sum(times.replicas) > MOST_WORKERS or sum(times.replicas) * microbatches > MOST_MICROBATCHES:
        return price
    choice = choose_depths(times, below_s / microbatches) if rule == "auto" else price_depths(times, price.in_flight)
    memory = tuple(
        stage_memory(ledger.footprint(stage).divided(microbatches), depth, versions_of(schedule, depth))
        for stage, depth in zip(stages, choice.depths, strict=True)
    )
    seconds = choice.seconds_per_unit * microbatches
    return replace(price, seconds_per_minibatch=seconds, in_flight=choice.depths, memory=memory)


def pipeline_times(
    ledger: Ledger,
    stages: Sequence[Candidate],
    cluster: Cluster,
    price: Price,
    schedule: ScheduleName,
    microbatches: int,
) -> PipelineTimes:
    topology = Topology(cluster)
    ranks = rank_ranges([stage.replicas for stage in stages])
    moved = transfers(ledger, stages)
    wires = {
        (t.source, t.target): TransferTimes(
            topology.message_s(ranks[t.source], ranks[t.target], t.output_bytes),
            topology.message_s(ranks[t.source], ranks[t.target], t.gradient_bytes) if t.gradient_bytes else None,
        )
        for t in moved
    }
    deepest = tuple(
        max(depth, _deepest(ledger, stage, cluster.memory_of(stage.kind), schedule, microbatches))
        for stage, depth in zip(stages, price.in_flight, strict=True)
    )
    return PipelineTimes(
        replicas=tuple(stage.replicas for stage in stages),
        stages=tuple(
            _stage_times(ledger, stage, index, moved, topology.stage_link(ranks[index]))
            for index, stage in enumerate(stages)
        ),
        transfers=wires,
        busiest_s=price.bottleneck.busy_s / microbatches,
        deepest=deepest,
        schedule=schedule,
        microbatches=microbatches,
    )


def _deepest(
    ledger: Ledger, stage: Candidate, memory_bytes: int | None, schedule: ScheduleName, microbatches: int
) -> int:
    """The most minibatches in flight that memory allows, and two versions of the weights where there are no more."""
    stashing = schedule == "1f1b"
    depth = UNLIMITED if stashing else microbatches // stage.replicas + 1
    if memory_bytes is None:
        return depth
    footprint = ledger.footprint(stage).divided(microbatches)
    fit = footprint.most_in_flight(memory_bytes, stashing=stashing, versions=1 if stashing else VERSIONS)
    return min(depth, int(fit))


def _stage_times(ledger: Ledger, stage: Candidate, index: int, moved: Sequence[Transfer], link: Link) -> StageTimes:
    work = ledger.work(stage)
    plain = StageTimes(
        float(work.forward_s), float(work.backward_s), float(work.update_s), recompute_s=float(work.recompute_s)
    )
    times = with_handling(plain, index, moved, link)
    ring_s = float(ring_all_reduce_s(work.trainable_bytes, stage.replicas, link))
    return replace(times, all_reduce_s=float(backward_and_reduce_s(times.backward_s, ring_s, link)) if ring_s else 0.0)


def published_depths(replicas: Sequence[int]) -> Depths:
    """NOAM for every stage."""
    return tuple(warm_up_depth(replicas, stage) for stage in range(len(replicas)))


def price_depths(times: PipelineTimes, depths: Depths) -> DepthChoice:
    """Seconds per unit of given depths, by simulation of the streams; `TOLERANCE` of the waiting is not counted."""
    return DepthChoice(depths, max(times.busiest_s, _simulated_s(times, depths) / (1 + TOLERANCE)))


def choose_depths(times: PipelineTimes, below_s: float = math.inf) -> DepthChoice:
    """The published depths, or deeper ones where every minibatch more in flight gains at least `WORTH`.

    Args:
        times: of the pipeline.
        below_s: a time that the pipeline has to reach; where the counted depths are `FAR` from it, they are all.
    """
    published = published_depths(times.replicas)
    best, trimmed = price_depths(times, published), True
    for number, candidate in enumerate(_deeper(times)):
        if number and best.seconds_per_unit > below_s * FAR:
            break
        if best.seconds_per_unit > times.busiest_s:
            deeper = price_depths(times, candidate)
            if _regret(deeper, published) < _regret(best, published):
                best, trimmed = deeper, False
    return best if trimmed else _trimmed(times, best)


def _deeper(times: PipelineTimes) -> Iterator[Depths]:
    """Candidates, each at least as deep as the one before: the count at the top of this file, and a little beyond."""
    counted, last = _counted_depths(times), len(times.replicas) - 1
    candidates = [counted]
    # For long pipelines, whose simulation is slow, the first stage or all.
    for more, upto in [(1, upto) for upto in (range(1, last + 1) if last < 8 else (1, last))] + [(2, last)]:
        candidates.append(tuple(depth + more * (stage < upto) for stage, depth in enumerate(counted)))
    candidates.append(_counted_depths(times, more=1))
    for candidate in dict.fromkeys(candidates):
        yield tuple(map(min, candidate, times.deepest))


def _regret(choice: DepthChoice, published: Depths) -> float:
    return choice.seconds_per_unit * (1 + WORTH * (choice.depths[0] - published[0]))


def _trimmed(times: PipelineTimes, best: DepthChoice) -> DepthChoice:
    """Take back what is in flight for nothing at the first stage, which has the most."""
    low, high = warm_up_depth(times.replicas, 0), best.depths[0]
    while low < high:
        middle = (low + high) // 2
        less = price_depths(times, (middle, *best.depths[1:]))
        if less.seconds_per_unit > best.seconds_per_unit:
            low = middle + 1
        else:
            best, high = less, middle
    return best


def _counted_depths(times: PipelineTimes, more: int = 0) -> Depths:
    """The inequality at the top of this file, from the last stage to the first, and `more` at every stage but that."""
    replicas = times.replicas
    depths = [1]
    outstanding = 2.0 * replicas[-1] - 1
    for stage in reversed(range(len(replicas) - 1)):
        own_s = times.stages[stage].compute_s
        wire_s = sum(
            transfer.activation_s + (transfer.gradient_s or 0.0)
            for (source, target), transfer in times.transfers.items()
            if source <= stage < target
        )
        outstanding += min(own_s / times.busiest_s, replicas[stage]) + replicas[stage] - 1 + wire_s / times.busiest_s
        depth = math.ceil(outstanding / replicas[stage] * (1 - TOLERANCE))
        depths.append(max(depth, warm_up_depth(replicas, stage)) + more)
        outstanding = float(depths[-1] * replicas[stage])
    return tuple(reversed(depths))


def _simulated_s(times: PipelineTimes, depths: Depths) -> float:
    ranks, first = [], 0
    for replicas in times.replicas:
        ranks.append(tuple(range(first, first + replicas)))
        first += replicas
    channels = tuple(Channel(*ends, gradient=t.gradient_s is not None) for ends, t in sorted(times.transfers.items()))
    shape = PipelineShape(tuple(ranks), channels, times.schedule, times.microbatches, depths=depths)
    if times.microbatches > 1:
        # Completions come in bursts of a minibatch.
        outcome = simulate(shape, times.stages, times.transfers, _SIMULATED_MINIBATCHES)
        return outcome.seconds_per_unit(times.microbatches)
    period = math.lcm(*times.replicas)
    # Long enough to forget the start, and to see several periods of round-robin where that is possible.
    minibatches = max(96, 16 * max(times.replicas), min(8 * period, 400))
    outcome = simulate(shape, times.stages, times.transfers, minibatches)
    return outcome.seconds_per_unit(period if 8 * period <= minibatches else times.replicas[-1])
