"""Places of ranks in a cluster of several levels, and how busy a plan keeps the links between them.

Ranks fill servers in order. A message between two ranks crosses the links of every level up to the lowest one whose
group holds both: it is as slow as the slowest of them, keeps each end's own link busy for that long, and takes its
bytes' time on the link of every group that it leaves or enters, which the devices of the group share. A ring
all-reduce visits its ranks in ascending order, so it crosses the link of each group that it passes through once each
way, whichever ranks they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.network.link import Link
from planner.cost.work import Floats, Integers
from planner.formats.cluster import Cluster

MOST_REMEMBERED = 256  # GPUs of a cluster, whose shares are kept

Ranks = Sequence[int]  # of a stage's replicas, in their order; a range where they are consecutive


def rank_ranges(replicas: Sequence[int]) -> list[range]:
    """Return the consecutive ranks of each stage."""
    ends = np.cumsum(replicas)
    return [range(int(end) - r, int(end)) for end, r in zip(ends, replicas, strict=True)]


def column_ranks(replicas: Sequence[int], columns: int) -> list[Ranks]:
    """Return the ranks of each stage where the pipeline is laid out in columns, one after the other.

    A column has an equal part of every stage's replicas: those whose numbers are equal modulo the columns, next to each
    other. Minibatch b runs on replica b mod r, so columns exchange gradients only. One column is a stage after the
    other; as many columns as replicas is a pipeline after the other.

    Args:
        replicas: of the stages, multiples of the columns.
        columns: how many.
    """
    parts = [r // columns for r in replicas]
    if columns == 1:
        return list(rank_ranges(replicas))
    size, starts = sum(parts), np.cumsum([0, *parts[:-1]])
    return [
        tuple(int(i % columns * size + start + i // columns) for i in range(r))
        for r, start in zip(replicas, starts, strict=True)
    ]


class Topology:
    """The levels of a cluster with more than one member, innermost first, numbered from 0.

    Attributes:
        groups: ranks in a group of each level.
        path_bytes_per_s: of a message whose ends meet at each level.
        ring_bytes_per_s: the same within an all-reduce.
        latency_s: of a message whose ends meet at each level.
    """

    def __init__(self, cluster: Cluster) -> None:
        levels = self._levels = cluster.joined
        self.gpus, self._handled = cluster.gpus, (cluster.overlap, cluster.coding_s_per_byte)
        self.groups = np.cumprod([level.size for level in levels])
        self._groups = tuple(self.groups.tolist())
        self.path_bytes_per_s = np.minimum.accumulate([level.bandwidth_bytes_per_s for level in levels])
        reduces = [level.all_reduce_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s for level in levels]
        self.ring_bytes_per_s = np.minimum.accumulate(reduces)
        self.latency_s = np.maximum.accumulate([level.latency_s for level in levels])
        # The links that several devices share: (level, ranks in one of its members, its bandwidths).
        self.shared = [
            (number, int(self.groups[number - 1]), level.bandwidth_bytes_per_s, reduces[number])
            for number, level in enumerate(levels)
            if number > 0 and level.shared
        ]

    def __len__(self) -> int:
        return len(self.groups)

    def level(self, one: ArrayLike, other: ArrayLike) -> Integers:
        """Return the lowest level whose group holds both ranks."""
        one, other = np.asarray(one)[..., None], np.asarray(other)[..., None]
        return np.asarray(np.sum(one // self.groups[:-1] != other // self.groups[:-1], axis=-1), dtype=np.int64)

    def link(self, level: int) -> Link:
        """Return the link of a message or an all-reduce within a group of the level."""
        return Link(
            float(self.path_bytes_per_s[level]),
            float(self.latency_s[level]),
            float(self.ring_bytes_per_s[level]),
            *self._handled,
        )

    def stage_link(self, ranks: Ranks) -> Link:
        """Return the link of a stage's all-reduce; messages that do not overlap are priced at the slowest bandwidth."""
        span = self.span(ranks)
        slowest = float(self.path_bytes_per_s[-1])
        return Link(slowest, float(self.latency_s[span]), float(self.ring_bytes_per_s[span]), *self._handled)

    def group_link(self, degree: int) -> Link:
        """Return the link of so many ranks, the first ones, that all-reduce between computations."""
        span = self.span(range(degree))
        link, levels = self.stage_link(range(degree)), self._levels[: span + 1]
        if any(level.sum_bandwidth_bytes_per_s is None for level in levels):
            return link
        slowest = min(level.sum_bandwidth_bytes_per_s or math.inf for level in levels)
        latency_s = max(level.sum_latency_s or 0.0 for level in levels)
        return replace(link, all_reduce_bandwidth_bytes_per_s=slowest, latency_s=latency_s)

    def span(self, ranks: Ranks) -> int:
        """Return the lowest level whose group holds all of these ranks."""
        return int(self.level(min(ranks), max(ranks)))

    def shares(self, ranks: Ranks, others: Ranks) -> Floats:
        """Return each rank's share of messages per level, to or from a stage: (levels, ranks); columns sum to 1.

        Minibatch b runs on replica b mod r of both stages, so that replica i meets replica j where i = j modulo the
        greatest common divisor of the two counts, each equally often.
        """
        compute = _shares if self.gpus <= MOST_REMEMBERED else _shares.__wrapped__
        return compute(self._groups, ranks, others)


@lru_cache(maxsize=4096)
def _shares(groups: tuple[int, ...], ranks: Ranks, others: Ranks) -> Floats:
    """Compute `Topology.shares`; searches ask for the same stages many times."""
    if isinstance(ranks, range) and isinstance(others, range):
        shares = _shares_of_ranges(groups, ranks, others)
    else:
        shares = _shares_one_by_one(groups, ranks, others)
    shares.setflags(write=False)
    return shares


def _shares_of_ranges(groups: tuple[int, ...], ranks: range, others: range) -> Floats:
    """Count the pairs of consecutive ranks by their ends, however many there are."""
    common = math.gcd(len(ranks), len(others))
    own = np.arange(ranks.start, ranks.stop)
    residue = (own - ranks.start + others.start) % common
    met = np.empty((len(groups), len(ranks)))
    for number, size in enumerate(groups):
        low = np.maximum(own // size * size, others.start)
        high = np.minimum((own // size + 1) * size, others.stop)
        first = low + (residue - low) % common
        met[number] = np.maximum(-(-(high - first) // common), 0)
    return np.asarray(np.diff(met, axis=0, prepend=0.0) / (len(others) // common))


def _shares_one_by_one(groups: tuple[int, ...], ranks: Ranks, others: Ranks) -> Floats:
    """Count the pairs of any ranks: a minibatch for each of them."""
    minibatches = np.arange(math.lcm(len(ranks), len(others)))
    own = minibatches % len(ranks)
    one, other = np.asarray(ranks)[own], np.asarray(others)[minibatches % len(others)]
    levels = sum((one // size != other // size).astype(np.int64) for size in groups[:-1])
    met = np.zeros((len(groups), len(ranks)))
    np.add.at(met, (levels, own), 1.0)
    return np.asarray(met / (len(minibatches) // len(ranks)))


class Loads:
    """Busy seconds of the links per microbatch, by transfers and all-reduces.

    Attributes:
        into: each rank's own link, arriving.
        out: each rank's own link, leaving.
        shared_into: for each shared level, the links of its members, arriving.
        shared_out: the same, leaving.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.into, self.out = np.zeros((2, topology.gpus))
        members = [topology.gpus // size for _, size, _, _ in topology.shared]
        self.shared_into = [np.zeros(count) for count in members]
        self.shared_out = [np.zeros(count) for count in members]

    def copy(self) -> Loads:
        """Return an independent copy."""
        twin = Loads.__new__(Loads)
        twin.topology = self.topology
        twin.into, twin.out = self.into.copy(), self.out.copy()
        twin.shared_into = [each.copy() for each in self.shared_into]
        twin.shared_out = [each.copy() for each in self.shared_out]
        return twin

    def times(self, count: float) -> Loads:
        """Return the loads of so many microbatches."""
        many = self.copy()
        for each in (many.into, many.out, *many.shared_into, *many.shared_out):
            each *= count
        return many

    def busiest(self, ranks: Ranks) -> tuple[float, float]:
        """Return the seconds of the busiest own link of these ranks, arriving and leaving."""
        own = _index(ranks)
        return float(self.into[own].max()), float(self.out[own].max())

    def add_transfer(self, source: Ranks, target: Ranks, exchange: Floats) -> float:
        """Add the messages between two stages.

        Args:
            source: ranks of the earlier stage.
            target: ranks of the later stage.
            exchange: bytes of activations and of gradients, and how many of each; `Traffic.amounts`.

        Returns:
            Seconds that one microbatch's messages take, on average over the pairs of ranks, both ways.
        """
        output_bytes, gradient_bytes, outputs, gradients = (float(amount) for amount in exchange[:4])
        forward_s = self._path_s(output_bytes, outputs)
        back_s = self._path_s(gradient_bytes, gradients)
        from_source, at_target = self.topology.shares(source, target), self.topology.shares(target, source)
        here, there = _index(source), _index(target)
        self.out[here] += forward_s @ from_source / len(source)
        self.into[here] += back_s @ from_source / len(source)
        self.into[there] += forward_s @ at_target / len(target)
        self.out[there] += back_s @ at_target / len(target)
        for number, (level, size, bandwidth, _) in enumerate(self.topology.shared):
            for ranks, shares, sent, received in (
                (source, from_source, output_bytes, gradient_bytes),
                (target, at_target, gradient_bytes, output_bytes),
            ):
                crossing = shares[level:].sum(axis=0) / len(ranks) / bandwidth
                members = np.asarray(ranks) // size
                self.shared_out[number] += np.bincount(members, crossing * sent, len(self.shared_out[number]))
                self.shared_into[number] += np.bincount(members, crossing * received, len(self.shared_into[number]))
        return float((forward_s + back_s) @ from_source.mean(axis=1))

    def add_ring(self, ranks: Ranks, trainable_bytes: float) -> None:
        """Add the all-reduce of a stage, once per round of r microbatches: 2(r-1)/r of the bytes each way."""
        r = len(ranks)
        moved = 2 * (r - 1) / (r * r) * trainable_bytes
        span = self.topology.span(ranks)
        own_s = moved / self.topology.ring_bytes_per_s[span]
        own = _index(ranks)
        self.into[own] += own_s
        self.out[own] += own_s
        for number, (level, size, _, bandwidth) in enumerate(self.topology.shared):
            if level <= span:
                members = np.unique(np.asarray(ranks) // size)
                self.shared_into[number][members] += moved / bandwidth
                self.shared_out[number][members] += moved / bandwidth

    def busiest_shared(self) -> tuple[float, int, int]:
        """Return the seconds of the busiest shared link, either way, its first rank, and the first rank after it."""
        busiest = (0.0, 0, 0)
        for (_, size, _, _), into, out in zip(self.topology.shared, self.shared_into, self.shared_out, strict=True):
            both = np.maximum(into, out)
            member = int(np.argmax(both))
            if both[member] > busiest[0]:
                busiest = (float(both[member]), member * size, (member + 1) * size)
        return busiest

    def _path_s(self, size_bytes: float, messages: float) -> Floats:
        """Return the seconds of these bytes in this many messages, by the level at which their ends meet."""
        return np.asarray(size_bytes / self.topology.path_bytes_per_s + messages * self.topology.latency_s)


def _index(ranks: Ranks) -> slice | Integers:
    """Return what picks the ranks' own links from an array."""
    return slice(ranks.start, ranks.stop) if isinstance(ranks, range) else np.asarray(ranks)
