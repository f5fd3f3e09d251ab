"""Bound what a stage costs in each place of a cluster of several levels.

All stages before a stage are on lower ranks, all after it on higher ones, so its messages travel at
least to the nearest rank outside. With those distances the bound of a stage depends only on its
layers, its replicas and its first rank. First ranks that differ by whole groups of the second
outermost level have the same bound: they have the same *phase*.

Arrays have axes (phase, replicas - 1, stage), or those at the end of these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.models.asynchronous import AsynchronousModel
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link
from planner.cost.network.topology import Topology
from planner.cost.work import Floats, Integers, Work
from planner.solver.problem.problem import Problem
from planner.solver.search.chain.variants import Variants

# Rows of what a stage exchanges with earlier stages, or with later ones: see `states.FRONTS`.
ACTIVATIONS = 0
GRADIENTS = 1
MESSAGES = 2  # on from the row of their bytes
# What is received from earlier stages and from later ones, and what is sent to them.
DIRECTIONS = ((ACTIVATIONS, GRADIENTS), (GRADIENTS, ACTIVATIONS))

Sides = tuple[Floats, Floats]  # exchanged with earlier stages, and with later ones


@dataclass(frozen=True)
class StageBounds:
    """Bounds of the stages that begin at one state, in every way to run them."""

    variants: Variants
    sum_s: Floats  # of their part of the sum; zero for the asynchronous pipeline
    max_s: Floats  # of their part of the maximum
    most: Integers  # microbatches that may be in flight; 0 where so many replicas are not allowed

    @property
    def ends(self) -> Integers:
        """States where they end."""
        return self.variants.ends

    def limited(self, gpus: int) -> NDArray[np.bool_]:
        """Return which ways do not allow so many GPUs after the stage on some replicas."""
        return np.asarray((self.most <= gpus).any(axis=0))


@dataclass(frozen=True)
class Path:
    """Price of messages between replicas of a stage and the nearest rank outside."""

    s_per_byte: Floats
    latency_s: Floats

    def add(self, seconds: Floats | float, bytes_: Floats, messages: Floats) -> Floats:
        """Return the seconds and those of the messages."""
        return seconds + bytes_ * self.s_per_byte + messages * self.latency_s


class Places:
    """Distances for every phase of the first rank and every number of replicas."""

    def __init__(self, topology: Topology, most_replicas: int) -> None:
        self.topology = topology
        self.phases = phases_of(topology)
        self.first = np.arange(self.phases)[:, None]
        self.replicas = np.arange(1, most_replicas + 1)
        self.end = self.first + self.replicas
        last = self.end - 1
        before = np.broadcast_to(self.first - 1, last.shape)
        self.span = topology.level(self.first, last)

        # To earlier and to later stages: of the first replica, of the last, and the mean of all.
        self.first_paths = self._path(self.first, before), self._path(self.first, self.end)
        self.last_paths = self._path(last, before), self._path(last, self.end)
        self.mean_paths = self._mean_path(before), self._mean_path(self.end)

    def on_span(self, stages: int, seconds: Callable[[Link], Floats]) -> Floats:
        """Return seconds on the link of a stage's span, from those by replicas and stage on
        a link.
        """
        links = [self.topology.stage_link(range(size)) for size in self.topology.groups.tolist()]
        shape = len(self.replicas), stages
        levels = [np.broadcast_to(seconds(link), shape) for link in links]
        return np.stack(levels)[self.span, self.replicas - 1]

    def leaving(self, size: int) -> Iterator[tuple[Integers, Integers]]:
        """Yield the replicas in a group whose messages to earlier, and to later stages leave it.

        A stage may have part of its first group of `size` ranks and of its last one. A group in the
        middle is full of it.
        """
        first = self.first
        end = self.end
        last = end - 1

        # 1. In its first group.
        in_first = np.minimum(self.replicas, size - first % size)
        begins_group = first % size == 0
        leaves_first = end // size > first // size
        yield in_first * begins_group, in_first * leaves_first

        # 2. In its last group.
        in_last = np.minimum(self.replicas, last % size + 1)
        enters_last = (first - 1) // size < last // size
        ends_group = end % size == 0
        yield in_last * enters_last, in_last * ends_group

        # 3. In those between.
        first_whole = -(-first // size)
        has_middle = end // size > first_whole
        in_middle = size * has_middle
        yield in_middle, in_middle

    def _path(self, rank: Integers, outside: Integers) -> Path:
        levels = self.topology.level(rank, outside)[..., None]
        return Path(1 / self.topology.path_bytes_per_s[levels], self.topology.latency_s[levels])

    def _mean_path(self, outside: Integers) -> Path:
        """Return the mean of the paths from each replica."""
        levels = [self.topology.level(self.first + i, outside) for i in self.replicas - 1]
        last = self.replicas - 1

        def mean(per_level: Floats) -> Floats:
            sums = np.cumsum(per_level[np.stack(levels)], axis=0)
            return np.asarray(sums[last, :, last].T / self.replicas)[..., None]

        return Path(mean(1 / self.topology.path_bytes_per_s), mean(self.topology.latency_s))


def phases_of(topology: Topology) -> int:
    """Return how many first ranks of a stage differ."""
    if len(topology) > 1:
        return int(topology.groups[-2])
    return 1


def bounds_of(problem: Problem, places: Places, variants: Variants) -> StageBounds:
    """Bound what stages cost in these ways, in every place."""
    sides = variants.source.space.sides(variants.state, variants.ends)
    if problem.schedule.asynchronous:
        max_s = _asynchronous_s(variants.work, places, sides)
        sum_s = np.zeros_like(max_s)
    else:
        max_s = _synchronous_s(variants.work, places, sides, problem.synchronous())
        sum_s = _sum_s(variants.work, places, sides, problem.synchronous())

    replicas = places.replicas[:, None]
    most = variants.most_in_flight(replicas, problem.schedule, problem.microbatches)
    allowed = variants.allowed(np.broadcast_to(replicas, most.shape))
    return StageBounds(variants, sum_s, max_s, np.where(allowed, most, 0))


def _asynchronous_s(work: Work, places: Places, sides: Sides) -> Floats:
    """Return the busy seconds of the busiest resource: compute, own link or shared link."""
    r = places.replicas[:, None]
    stages = len(work.forward_s)
    compute_s = places.on_span(
        stages,
        lambda link: AsynchronousModel(link).resources_s(work, r)["compute"],
    )
    ring_bytes = 2 * (r - 1) / (r * r) * work.trainable_bytes
    ring_s = (1 / places.topology.ring_bytes_per_s)[places.span][..., None] * ring_bytes
    own_s = _own_link_s(places, sides) + ring_s
    shared_s = _shared_link_s(places, sides, ring_bytes)
    return np.maximum(compute_s, np.maximum(own_s, shared_s))


def _sum_s(work: Work, places: Places, sides: Sides, model: SynchronousModel) -> Floats:
    """Return the part of the sum: that without transfers, and half of each message."""
    silent = work.without_transfers()
    sum_s = places.on_span(len(work.forward_s), lambda link: _on(link, model).sum_s(silent))
    for side, path in zip(sides, places.mean_paths, strict=True):
        activation_bytes, gradient_bytes, activations, gradients = side[:4]
        moved_s = path.add(0.0, activation_bytes + gradient_bytes, activations + gradients)
        sum_s = sum_s + moved_s / 2

    return sum_s


def _synchronous_s(work: Work, places: Places, sides: Sides, model: SynchronousModel) -> Floats:
    """Return the part of the maximum: the busiest resource after the first microbatches."""
    r = places.replicas[:, None]
    stages = len(work.forward_s)
    compute_s = places.on_span(
        stages,
        lambda link: _on(link, model).resources_s(work, r)["compute"],
    )
    end_s = places.on_span(stages, lambda link: _on(link, model).end_s(work, r))

    rounds = np.ceil(model.microbatches / r)
    later = (rounds - 1) * r
    own_s = later * _own_link_s(places, sides) + end_s
    busiest_s = np.maximum(compute_s, own_s)

    shared_s = _shared_link_s(places, sides, np.zeros(1))
    return np.maximum(busiest_s, (model.microbatches - 1) * shared_s)


def _on(link: Link, model: SynchronousModel) -> SynchronousModel:
    return SynchronousModel(link, model.schedule, model.microbatches)


def _own_link_s(places: Places, sides: Sides) -> Floats:
    """Return the busy time of the first or last replica's link, in its busier direction.

    All-reduces are left out.
    """
    left, right = sides
    busiest_s = np.zeros(1)
    for to_left, to_right in (places.first_paths, places.last_paths):
        for of_left, of_right in DIRECTIONS:
            seconds = to_left.add(0.0, left[of_left], left[of_left + MESSAGES])
            seconds = to_right.add(seconds, right[of_right], right[of_right + MESSAGES])
            busiest_s = np.maximum(busiest_s, seconds)

    return busiest_s / places.replicas[:, None]


def _shared_link_s(places: Places, sides: Sides, ring_bytes: Floats) -> Floats:
    """Return the busy time of the busiest shared link of a group that holds part of the stage."""
    left, right = sides
    busiest_s = np.zeros(1)
    for level, size, bandwidth, ring_bandwidth in places.topology.shared:
        crosses = (places.span >= level)[..., None]
        ring_s = crosses * ring_bytes / ring_bandwidth

        for to_left, to_right in places.leaving(size):
            left_s_per_byte = (to_left / places.replicas / bandwidth)[..., None]
            right_s_per_byte = (to_right / places.replicas / bandwidth)[..., None]
            for of_left, of_right in DIRECTIONS:
                left_s = left[of_left] * left_s_per_byte
                right_s = right[of_right] * right_s_per_byte
                busiest_s = np.maximum(busiest_s, left_s + right_s + ring_s)

    return busiest_s
