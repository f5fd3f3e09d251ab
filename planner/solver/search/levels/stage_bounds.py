"""Bound from below what stages cost on a cluster of several levels, for every first rank.

A stage's links depend on the places of the stages around it, which a search from one end does not know. Two things are
certain, though. Its all-reduce crosses the levels that its own ranks span. And all stages before it are on lower ranks,
all after it on higher ones, so its messages travel at least to the nearest rank outside. With those distances the bound
of a stage depends only on its layers, its replicas and its first rank; and first ranks that differ by whole groups of
the second outermost level have the same bound (they have the same phase).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.models.registry import asynchronous_model
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.topology import Topology
from planner.cost.work import Floats, Integers, Work
from planner.formats.names import CostModelName
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import StateSpace
from planner.solver.search.chain.ways import Ways

# What is minimised: a cost model of the asynchronous pipeline, or the model of a synchronous one.
Objective = CostModelName | SynchronousModel
BOTH_WAYS = ((0, 1), (1, 0))  # rows of `StateSpace.sides`: activations come from earlier stages, gradients from later


def objective_of(problem: Problem) -> Objective:
    """Return the cost model whose seconds are minimised."""
    return problem.setting.cost_model if problem.schedule.stashes else problem.synchronous()


@dataclass(frozen=True)
class StageBounds:
    """Ways to run the stages that begin at one state; bounds have axes (phase of the first rank, replicas - 1, way).

    Attributes:
        ways: of the stages.
        sum_s: bound of their part of the sum; zero for the asynchronous pipeline.
        max_s: bound of their part of the maximum.
        most: by replicas - 1 and way, the microbatches that may be in flight; 0 where the replicas are not allowed.
    """

    ways: Ways
    sum_s: Floats
    max_s: Floats
    most: Integers

    @property
    def others(self) -> Integers:
        """States where they end."""
        return self.ways.others


class Places:
    """Distances for every phase of the first rank and every number of replicas."""

    def __init__(self, topology: Topology, most_replicas: int) -> None:
        self.topology = topology
        self.phases = int(topology.groups[-2]) if len(topology) > 1 else 1
        self.first = np.arange(self.phases)[:, None]
        self.replicas = np.arange(1, most_replicas + 1)
        self.end = self.first + self.replicas
        last, before = self.end - 1, self.first - 1
        level = topology.level
        self.span = level(self.first, last)
        self.before_last = level(before, last)  # from the stage's farthest rank to the nearest one outside
        self.first_after = level(self.first, self.end)
        # Levels of the messages (to earlier, to later stages) of the first replica, and of the last one.
        self.sides = (
            (np.broadcast_to(level(self.first, before), self.span.shape), self.first_after),
            (self.before_last, level(last, self.end)),
        )

        # Mean slowness and latency from a replica to the nearest rank before and after the stage.
        self.path_left, self.latency_left = self._means(before)
        self.path_right, self.latency_right = self._means(self.end)

    def at(self, per_level: Sequence[Floats], levels: Integers) -> Floats:
        """Pick, from arrays (replicas, stages) per level, those of the given levels: (phases, replicas, stages)."""
        return np.stack(per_level)[levels, np.arange(len(self.replicas))]

    def _means(self, outside: Integers) -> tuple[Floats, Floats]:
        """Return the mean seconds per byte and latency over the ways from each replica to a rank outside."""
        outside = np.broadcast_to(outside, self.span.shape)
        levels = np.stack([self.topology.level(self.first + i, outside) for i in range(len(self.replicas))])
        own = np.arange(len(self.replicas))

        def mean(per_level: Floats) -> Floats:
            return np.asarray(np.cumsum(per_level[levels], axis=0)[own, :, own].T / self.replicas)

        return mean(1 / self.topology.path_bytes_per_s), mean(self.topology.latency_s)

    def groups_inside(self, size: int) -> list[tuple[NDArray[np.bool_] | Integers, ...]]:
        """Return groups of `size` ranks that hold part of the stage: its first group, its last, and one in the middle.

        For each: the replicas in it, whether all earlier stages are outside, and whether all later stages are.
        """
        head, tail = self.first // size, (self.end - 1) // size
        # A group in the middle is full of the stage, with earlier and later stages outside.
        full = (self.end // size - -(-self.first // size) >= 1) * size
        return [
            (
                np.minimum(self.replicas, size - self.first % size),
                np.broadcast_to(self.first % size == 0, full.shape),
                self.end // size > head,
            ),
            (
                np.minimum(self.replicas, (self.end - 1) % size + 1),
                (self.first - 1) // size < tail,
                self.end % size == 0,
            ),
            (full, full > 0, full > 0),
        ]


def bounds_of(ways: Ways, places: Places, objective: Objective) -> StageBounds:
    """Bound what stages cost in these ways, in every place."""
    space, limits, replicas = ways.source.space, ways.source.limits, places.replicas[:, None]
    links, footprint = _Links(ways, space, places), ways.footprint_on(replicas)
    if isinstance(objective, SynchronousModel):
        sum_s, max_s = _synchronous(ways.work, links, objective)
        footprint = footprint.divided(objective.microbatches)
    else:
        max_s = _asynchronous(ways.work, links, objective)
        sum_s = np.zeros_like(max_s)
    shape = (len(replicas), len(ways))
    most = np.full(shape, limits.deepest)
    if limits.memory_bytes is not None:
        stashing = not isinstance(objective, SynchronousModel)
        most = np.minimum(most, footprint.most_in_flight(limits.memory_bytes, stashing))
    return StageBounds(ways, sum_s, max_s, np.where(ways.allowed(np.broadcast_to(replicas, shape)), most, 0))


def _asynchronous(work: Work, links: _Links, name: CostModelName) -> Floats:
    places = links.places
    topology, r = places.topology, places.replicas[:, None]
    if name != "resource":
        models = [asynchronous_model(name, topology.link(level)) for level in range(len(topology))]
        busy = [model.resources_s(work, r) for model in models]
        shape = (len(r), len(work.forward_s))
        bound = places.at([each["compute"] for each in busy], places.span)
        for resource, levels in (("cut_before", places.before_last), ("cut_after", places.first_after)):
            if resource in busy[0]:
                cuts = [np.broadcast_to(each[resource], shape) for each in busy]
                bound = np.maximum(bound, places.at(cuts, levels))
        return bound
    computes = [
        asynchronous_model(name, topology.stage_link(range(int(size)))).resources_s(work, r)["compute"]
        for size in topology.groups
    ]
    ring = 2 * (r - 1) / (r * r) * links.once(work.trainable_bytes)
    own_s = links.own_s() + (1 / topology.ring_bytes_per_s)[places.span][..., None] * ring
    link_s = np.maximum(own_s, links.shared_s(ring))
    return np.maximum(places.at(computes, places.span), links.of_ways(link_s))


def _synchronous(work: Work, links: _Links, model: SynchronousModel) -> tuple[Floats, Floats]:
    places, sides = links.places, links.sides
    topology, r = places.topology, places.replicas[:, None]
    shape = (len(r), len(work.forward_s))
    placed = [
        SynchronousModel(topology.stage_link(range(int(size))), model.schedule, model.microbatches)
        for size in topology.groups
    ]
    alone = work.without_transfers()
    sums = places.at([np.broadcast_to(each.sum_s(alone, r), shape) for each in placed], places.span)
    for side, path_s, latency_s in (
        (sides[0], places.path_left, places.latency_left),
        (sides[1], places.path_right, places.latency_right),
    ):
        moved_s = (side[0] + side[1]) * path_s[..., None] + (side[2] + side[3]) * latency_s[..., None]
        sums = sums + links.of_ways(moved_s / 2)  # each end counts half of a message
    computes = [np.broadcast_to(each.resources_s(work, r)["compute"], shape) for each in placed]
    bound = places.at(computes, places.span)
    if model.schedule.pipelined:
        ends = places.at([np.broadcast_to(each.end_s(work, r), shape) for each in placed], places.span)
        more = (np.ceil(model.microbatches / r) - 1) * r
        bound = np.maximum(bound, more * links.of_ways(links.own_s()) + ends)
        shared_s = links.shared_s(np.zeros((len(r), 1)))
        bound = np.maximum(bound, (model.microbatches - 1) * links.of_ways(shared_s))
    return sums, bound


class _Links:
    """The links of stages, in every place. All ways to run a stage send the same, so each stage is computed once."""

    def __init__(self, ways: Ways, space: StateSpace, places: Places) -> None:
        self.places = places
        self._stage, self._first = ways.stage, np.flatnonzero(np.diff(ways.stage, prepend=-1))
        self.sides = space.sides(ways.state, ways.others[self._first])

    def once(self, values: Floats) -> Floats:
        """Return one of the equal values of each stage's ways."""
        return np.broadcast_to(values, self._stage.shape)[self._first]

    def of_ways(self, values: Floats) -> Floats:
        """Repeat values of each stage, along the last axis, for each of its ways."""
        if len(self._first) == len(self._stage):
            return values
        return np.asarray(np.broadcast_to(values, (*values.shape[:-1], len(self._first)))[..., self._stage])

    def own_s(self) -> Floats:
        """Return the busy time of the first or last replica's link, in its busier direction, without all-reduces."""
        (left, right), places = self.sides, self.places
        slowness, latency = 1 / places.topology.path_bytes_per_s, places.topology.latency_s
        busiest = np.zeros(1)
        for to_left, to_right in places.sides:
            for incoming, outgoing in BOTH_WAYS:
                seconds = (
                    left[incoming] * slowness[to_left][..., None]
                    + left[incoming + 2] * latency[to_left][..., None]
                    + right[outgoing] * slowness[to_right][..., None]
                    + right[outgoing + 2] * latency[to_right][..., None]
                )
                busiest = np.maximum(busiest, seconds)
        return busiest / places.replicas[:, None]

    def shared_s(self, ring: Floats) -> Floats:
        """Return the busy time of the busiest shared link of a group that holds part of the stage."""
        (left, right), places = self.sides, self.places
        busiest = np.zeros(1)
        for level, size, bandwidth, ring_bandwidth in places.topology.shared:
            crossing = (places.span >= level)[..., None] * ring / ring_bandwidth
            for inside, from_left, from_right in places.groups_inside(size):
                share_left = (inside * from_left / places.replicas / bandwidth)[..., None]
                share_right = (inside * from_right / places.replicas / bandwidth)[..., None]
                for incoming, outgoing in BOTH_WAYS:
                    busiest = np.maximum(
                        busiest, left[incoming] * share_left + right[outgoing] * share_right + crossing
                    )
        return busiest
