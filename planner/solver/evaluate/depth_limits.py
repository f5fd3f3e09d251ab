"""What limits the depths of a candidate, and how fast any depths can be.

A depth is how many units one replica of a stage has in flight, between their forward and their
backward.
"""

import math

import numpy as np

from planner.cost.candidate import Candidate
from planner.cost.communicators import reserves_of
from planner.cost.network.link import backward_and_reduce_s, ring_all_reduce_s
from planner.cost.network.topology import Topology
from planner.cost.overheads import Reserve
from planner.options.solving import UNLIMITED
from planner.simulator.pipeline_costs import PipelineCosts
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation

Depths = tuple[int, ...]  # per stage


def deepest_allowed(problem: Problem, candidate: Evaluation) -> Depths:
    """Return the most units in flight that each stage may have, at least the published ones."""
    reserves = reserves_of(problem.layer_costs, candidate.stages)
    return tuple(
        max(published, _most_in_flight(problem, stage, reserve))
        for stage, published, reserve in zip(
            candidate.stages,
            candidate.price.in_flight,
            reserves,
            strict=True,
        )
    )


def _most_in_flight(problem: Problem, stage: Candidate, reserve: Reserve) -> int:
    """Return the most units in flight that the schedule, the rules and the memory allow a stage."""
    schedule = problem.schedule
    most = min(
        schedule.deepest(stage.replicas, problem.microbatches) or UNLIMITED,
        problem.rules.deepest(schedule),
    )

    memory_bytes = problem.cluster.memory_of(stage.options.kind)
    if memory_bytes is None:
        return most

    footprint = problem.layer_costs.footprint(stage).divided(problem.microbatches)
    fitting = footprint.most_in_flight(
        reserve.room(memory_bytes),
        stashing=schedule.stashes,
        versions=schedule.weight_versions,
    )

    return min(most, int(fitting))


def crossing_s(pipeline: PipelineCosts) -> list[float]:
    """Return, per boundary behind a stage, the mean seconds of a unit's messages, both ways."""
    topology = Topology(pipeline.cluster)
    ranks = pipeline.shape.ranks
    seconds = [0.0] * len(ranks)

    for (source, target), sizes in pipeline.transfer_bytes.items():
        message_s = _message_s(topology, ranks[source], ranks[target], sizes)
        for stage in range(source, target):
            seconds[stage] += message_s

    return seconds


def _message_s(
    topology: Topology,
    source: tuple[int, ...],
    target: tuple[int, ...],
    sizes: tuple[int, ...],
) -> float:
    """Return the mean seconds of messages of these sizes over all pairs of ranks."""
    # Minibatch b is on replica b mod r of each stage.
    pairs = math.lcm(len(source), len(target))
    senders = np.resize(source, pairs)
    receivers = np.resize(target, pairs)
    levels = topology.level(senders, receivers)
    bandwidth = topology.pair_bytes_per_s(levels, senders, receivers)
    latency_s = topology.latency_s[levels]

    # A message takes its latency even if it is small, but no message is sent for no bytes.
    seconds = sum(size / bandwidth + latency_s for size in sizes if size)
    return float(np.mean(seconds))


def busiest_s(problem: Problem, candidate: Evaluation, pipeline: PipelineCosts) -> float:
    """Return the busy seconds per minibatch of the busiest resource. No depth is faster.

    The cost model fills the buckets of an all-reduce evenly over the backward. Where the profile
    says when each bucket is full, more of the all-reduce may be hidden, so the stage is busy for
    less.
    """
    bottleneck = candidate.price.bottleneck
    costs = pipeline.stages[bottleneck.stage]
    if bottleneck.resource != "compute" or not costs.ready_s:
        return bottleneck.busy_s

    link = problem.link
    if problem.placed:
        link = problem.topology.stage_link(candidate.ranks[bottleneck.stage])
    if not link.overlap:
        return bottleneck.busy_s

    # 1. The last backward of a replica accumulates, if it has run others before.
    replicas = candidate.stages[bottleneck.stage].replicas
    last_s = costs.backward_s
    if problem.microbatches > replicas:
        last_s += costs.accumulate_s

    # 2. By how much the cost model's even buckets end later than the real ones.
    reduce_s = float(ring_all_reduce_s(costs.reduced_bytes, replicas, link))
    even_s = float(backward_and_reduce_s(last_s, reduce_s, link))
    saved_s = max(0.0, even_s - costs.buckets(last_s).reduced_s(reduce_s))

    # 3. Under 1f1b a round is one minibatch per replica.
    if not problem.schedule.divides:
        saved_s /= replicas
    return bottleneck.busy_s - saved_s
