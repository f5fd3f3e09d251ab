"""Stages that may become a plan, as the simulation sees them, and what their schedule takes of time in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.cost.layer_costs import Candidate, LayerCosts
from planner.cost.price import Price
from planner.cost.topology import Topology, rank_ranges
from planner.cost.weight_copies import adding_of_copies_s, copied_in, ready_of_gradients_s, update_of_copies_s
from planner.formats.cluster import Cluster
from planner.formats.plan_shape import trainable_pairs
from planner.schedule.schedule import Channel, PipelineShape, Schedule
from planner.simulator.pipeline_costs import PipelineCosts, StageCosts
from planner.solver.candidates.exchanged import shared_between, transfers

MOST_WORKERS = 64  # beyond, simulating takes too long
MOST_COMPUTATIONS = 2**12  # forwards of a minibatch on all workers, likewise


def too_large(stages: Sequence[Candidate], schedule: Schedule, microbatches: int) -> bool:
    """Whether simulating these stages takes longer than a search should; the cost model's word stands then."""
    workers = sum(stage.replicas for stage in stages)
    if schedule.asynchronous:
        return workers > MOST_WORKERS or workers * microbatches > MOST_COMPUTATIONS
    return len(stages) * microbatches > MOST_COMPUTATIONS


def pipeline_for(
    layer_costs: LayerCosts,
    stages: Sequence[Candidate],
    cluster: Cluster,
    price: Price,
    schedule: Schedule,
    microbatches: int,
) -> PipelineCosts:
    """The stages with as many units in flight as their price says.

    As `planner.simulator.plan.costs_of` has it of the plan that is made of them.
    """
    moved = transfers(layer_costs, stages)
    copied = copied_in(layer_costs, stages)
    works = [layer_costs.work(stage) for stage in stages]
    times = [
        StageCosts(
            forward_s=float(work.forward_s),
            backward_s=float(work.backward_s),
            update_s=float(work.update_s) + update_of_copies_s(stage, again),
            recompute_s=float(work.recompute_s),
            accumulate_s=float(work.accumulate_s) + adding_of_copies_s(stage, again),
            ready_s=ready_of_gradients_s(layer_costs, stage, again),
            gradient_bytes=int(work.trainable_bytes) + sum(layer.gradient_bytes for layer in again),
        )
        for work, stage, again in zip(works, stages, copied, strict=True)
    ]
    shared = shared_between(layer_costs, stages)
    shape = PipelineShape(
        ranks=stage_ranks(stages, price),
        channels=tuple(Channel(t.source, t.target, t.gradient_bytes > 0) for t in moved),
        schedule=schedule,
        microbatches=microbatches,
        depths=price.in_flight,
        shared=trainable_pairs(shared, [stage.replicas for stage in stages], schedule),
    )
    return PipelineCosts.of(shape, cluster, times, moved, shared)


def wires_s(pipeline: PipelineCosts) -> dict[tuple[int, int], float]:
    """Seconds of a unit's messages between two stages, there and back, on average over their pairs of replicas."""
    topology, found = Topology(pipeline.cluster), {}
    for (source, target), sizes in pipeline.transfer_bytes.items():
        pairs = _pairs(pipeline.shape.ranks[source], pipeline.shape.ranks[target])
        levels = topology.level(pairs[:, 0], pairs[:, 1])
        seconds = sum(size / topology.path_bytes_per_s[levels] + topology.latency_s[levels] for size in sizes if size)
        found[source, target] = float(np.mean(seconds))
    return found


def _pairs(ranks: Sequence[int], others: Sequence[int]) -> np.typing.NDArray[np.int64]:
    """The ranks of two stages that meet: minibatch b is on replica b modulo their number in both."""
    many = math.lcm(len(ranks), len(others))
    return np.array([[ranks[b % len(ranks)], others[b % len(others)]] for b in range(many)])


def stage_ranks(stages: Sequence[Candidate], price: Price) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each stage: its own, or consecutive ones in the order of the pipeline's workers."""
    replicas = {worker: stage.replicas for worker, stage in zip(price.workers, stages, strict=True)}
    ranges = rank_ranges([replicas[worker] for worker in sorted(replicas)])
    return tuple(stage.ranks or tuple(ranges[worker]) for worker, stage in zip(price.workers, stages, strict=True))
