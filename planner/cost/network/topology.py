"""Places of ranks in a cluster of several levels, and how busy a plan keeps the links between them.

Ranks fill servers in order. A message between two ranks crosses the links of every level up to the
lowest one whose group holds both: it is as slow as the slowest of them, keeps each end's own link
busy for that long, and takes its bytes' time on the link of every group that it leaves or enters,
which the devices of the group share. A ring all-reduce visits its ranks in ascending order, so it
crosses the link of each group that it passes through once each way, whichever ranks they are.

Devices of a kind may have links of other rates than their levels'. A link that several of them
share is as fast as the slowest kind on it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.candidate import Candidate
from planner.cost.network.link import Link
from planner.cost.work import Floats, Integers, Work
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.files import replace

MOST_REMEMBERED = 256  # GPUs of a cluster, whose shares are kept

Ranks = Sequence[int]  # of a stage's replicas, in their order; a range where they are consecutive


def rank_ranges(replicas: Sequence[int]) -> list[range]:
    """Return the ranks of each stage where they are consecutive."""
    ends = np.cumsum(replicas)
    return [range(int(end) - r, int(end)) for end, r in zip(ends, replicas, strict=True)]


def column_ranks(replicas: Sequence[int], columns: int) -> list[Ranks]:
    """Return the ranks of each stage where the pipeline is laid out in columns, one after the
    other.

    A column has an equal part of every stage's replicas, which are multiples of the columns: those
    whose numbers are equal modulo the columns, next to each other, so that columns exchange
    gradients only.
    """
    if columns == 1:
        return list(rank_ranges(replicas))

    parts = [r // columns for r in replicas]  # of each stage in a column
    size = sum(parts)
    first = 0  # place of a stage in its column
    ranks: list[Ranks] = []
    for r, part in zip(replicas, parts, strict=True):
        ranks.append(tuple(i % columns * size + first + i // columns for i in range(r)))
        first += part

    return ranks


class Topology:
    """The levels of a cluster with more than one member, innermost first, numbered from 0."""

    def __init__(self, cluster: Cluster) -> None:
        levels = cluster.joined
        self._levels = levels
        self.gpus = cluster.gpus
        self._handled = (cluster.overlap, cluster.coding_s_per_byte)
        self.groups = np.cumprod([level.size for level in levels])  # ranks in a group of each level
        self._groups = tuple(self.groups.tolist())
        # Of each rank's links to their levels' rates, (levels, ranks); None where all are 1.
        self._ratios = self._link_ratios(cluster)
        # Of a message, or within an all-reduce, whose ends meet at each level, of the slowest rank.
        bandwidths = [level.bandwidth_bytes_per_s for level in levels]
        self._paths_bytes_per_s = self._of_ranks(bandwidths)
        self.path_bytes_per_s = self._slowest(self._paths_bytes_per_s)
        reduces = [
            level.all_reduce_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s
            for level in levels
        ]
        # Several rings at once share all of a link, of which one alone may not reach all.
        self._rings_bytes_per_s = self._of_ranks(
            [
                min(rate, level.ring_bytes_per_s or rate)
                for rate, level in zip(reduces, levels, strict=True)
            ]
        )
        self.ring_bytes_per_s = self._slowest(self._rings_bytes_per_s)
        self.latency_s = np.maximum.accumulate([level.latency_s for level in levels])
        # The links that several devices share: (level, ranks in one of its members, its
        # bandwidths).
        self.shared = [
            (number, int(self.groups[number - 1]), level.bandwidth_bytes_per_s, reduces[number])
            for number, level in enumerate(levels)
            if number > 0 and level.shared
        ]

    def __len__(self) -> int:
        return len(self.groups)

    def _link_ratios(self, cluster: Cluster) -> Floats | None:
        """Return each rank's rates by those of the cluster's levels, (levels, ranks); None where
        kinds of devices have the same links.
        """
        if not cluster.has_own_links:
            return None

        counts = [kind.count for kind in cluster.kinds]
        rows = []
        for place, number in enumerate(cluster.joined_numbers):
            of_kinds = [_link_ratio(kind, number) for kind in cluster.kinds]
            of_ranks = np.repeat(of_kinds, counts)

            # Ranks that share a link have the rate of the slowest.
            if place > 0 and cluster.levels[number].shared:
                sharing = int(self.groups[place - 1])
                slowest = of_ranks.reshape(-1, sharing).min(axis=1)
                of_ranks = np.repeat(slowest, sharing)
            rows.append(of_ranks)

        return np.array(rows)

    def _of_ranks(self, rates: Sequence[float]) -> Floats:
        """Return the slowest rate up to each level: (levels, ranks), or (levels, 1) where all ranks
        have the same.
        """
        column = np.asarray(rates, dtype=np.float64)[:, None]
        if self._ratios is not None:
            column = column * self._ratios
        return np.minimum.accumulate(column)

    def _slowest(self, rates: Floats, ranks: Ranks | None = None) -> Floats:
        """Return the slowest rates of these ranks, or of all, by level."""
        if self._ratios is None:
            return rates[:, 0]
        return np.asarray((rates if ranks is None else rates[:, _index(ranks)]).min(axis=1))

    def link_ratio(self, level: int, rank: int) -> float:
        """Return the ratio of a rank's link to the rate of a level."""
        return 1.0 if self._ratios is None else float(self._ratios[level, rank])

    def message_bytes_per_s(self, ranks: Ranks, others: Ranks) -> Floats:
        """Return the rate of each rank's messages to or from a stage, by the level at which their
        ends meet: (levels, ranks), or (levels, 1) where all ranks have the same.
        """
        if self._ratios is None:
            return self._paths_bytes_per_s
        own = self._paths_bytes_per_s[:, _index(ranks)]
        return np.minimum(own, self._slowest(self._paths_bytes_per_s, others)[:, None])

    def pair_bytes_per_s(self, levels: Integers, ranks: Integers, others: Integers) -> Floats:
        """Return the rate of messages between each pair of ranks, whose ends meet at a level."""
        if self._ratios is None:
            return self.path_bytes_per_s[levels]
        rates = self._paths_bytes_per_s
        return np.minimum(rates[levels, ranks], rates[levels, others])

    def shared_ratio(self, level: int, ranks: Ranks) -> Floats | float:
        """Return the ratios of the links that these ranks share to the rate of a level."""
        return 1.0 if self._ratios is None else self._ratios[level, _index(ranks)]

    def level(self, one: ArrayLike, other: ArrayLike) -> Integers:
        """Return the innermost level at which a group holds both ranks, of each pair."""
        inner = self.groups[:-1]
        group = np.asarray(one)[..., None] // inner
        other_group = np.asarray(other)[..., None] // inner
        return np.asarray(np.sum(group != other_group, axis=-1), dtype=np.int64)

    def link(self, level: int, ranks: Ranks | None = None) -> Link:
        """Return the link of messages, and of rings, whose ends meet at a level: that of the
        slowest of these ranks, or of all.
        """
        return Link(
            float(self._slowest(self._paths_bytes_per_s, ranks)[level]),
            float(self.latency_s[level]),
            float(self._slowest(self._rings_bytes_per_s, ranks)[level]),
            *self._handled,
        )

    def stage_link(self, ranks: Ranks) -> Link:
        """Return the link of a stage's all-reduce; messages that do not overlap are priced at the
        slowest bandwidth.
        """
        return replace(
            self.link(self.span(ranks), ranks),
            bandwidth_bytes_per_s=float(self.path_bytes_per_s[-1]),
        )

    def group_link(self, degree: int, first: int = 0) -> Link:
        """Return the link of so many ranks, from the first one, that all-reduce between
        computations.
        """
        ranks = range(first, first + degree)
        return self.measured_link(ranks, "sum") or self.stage_link(ranks)

    def exchange_link(self, degree: int, first: int = 0, copies: float | None = None) -> Link:
        """Return the link of so many ranks, from the first one, that exchange parts with each
        other, all with all, at the rate of a ring that would take as long.

        Of r ranks in groups of p on a level each sends (r-p)/r of its bytes out of its group, over
        a link that the group shares, or over its own; the slowest level counts:

            t = bytes · max over levels of  (q - p)/r / (rate / sharing)

        where q ranks are in a group of the next level. Where a row is one of k copies, of which
        each of the s groups gets one for all its ranks, a group gets 1 - (1 - 1/s)^k rows of a
        token in place of k/s.
        """
        ranks = range(first, first + degree)
        link = self.group_link(degree, first)
        span = self.span(ranks)
        if span == 0:
            return link
        slowest = 0.0
        inner = 1
        sharing: float
        for number in range(span + 1):
            outer = min(int(self.groups[number]), degree)
            level = self._levels[number]
            sharing = inner if level.shared and number > 0 else 1
            if copies is not None and number > 0:
                groups = degree / inner
                sharing *= groups * (1 - (1 - 1 / groups) ** copies) / copies
            rate = level.bandwidth_bytes_per_s * float(np.min(self.shared_ratio(number, ranks)))
            slowest = max(slowest, (outer - inner) / degree * sharing / rate)
            inner = outer

        return replace(link, all_reduce_bandwidth_bytes_per_s=(degree - 1) / degree / slowest)

    def measured_link(self, ranks: Ranks, what: Literal["sum", "gather", "scatter"]) -> Link | None:
        """Return the link of what ranks do together between computations, where it was measured on
        all their levels.
        """
        levels = self._levels[: self.span(ranks) + 1]
        rates = list[float]()
        for number, level in enumerate(levels):
            rate = getattr(level, f"{what}_bandwidth_bytes_per_s")
            if rate is None:
                return None
            rates.append(rate * float(np.min(self.shared_ratio(number, ranks))))

        latency_s, share, wait_s = (
            # waits are known of sums alone
            max(getattr(level, f"{what}_{name}", None) or 0.0 for level in levels)
            for name in ("latency_s", "wait_share", "wait_s")
        )
        link = replace(
            self.stage_link(ranks), all_reduce_bandwidth_bytes_per_s=min(rates), latency_s=latency_s
        )
        return replace(link, wait_share=share, most_wait_s=wait_s)

    def span(self, ranks: Ranks) -> int:
        """Return the outermost level that a ring over these ranks crosses."""
        return int(self.level(min(ranks), max(ranks)))

    def ring(self, ranks: Ranks) -> tuple[int, float]:
        """Return the outermost level that a ring over these ranks crosses, and its rate."""
        span = self.span(ranks)
        return span, float(self._slowest(self._rings_bytes_per_s, ranks)[span])

    def shares(self, ranks: Ranks, others: Ranks) -> Floats:
        """Return each rank's share of messages per level, to or from a stage: (levels, ranks);
        columns sum to 1.

        Replica i meets replica j where i = j modulo the greatest common divisor of the counts, each
        equally often.
        """
        compute = _shares if self.gpus <= MOST_REMEMBERED else _shares.__wrapped__
        return compute(self._groups, ranks, others)


@lru_cache(maxsize=2**14)  # of some hundred bytes
def _shares(groups: tuple[int, ...], ranks: Ranks, others: Ranks) -> Floats:
    """Compute `Topology.shares`: for each level, how many of the ranks that a rank meets are in its
    group there, but in none of a lower level.
    """
    turns = math.gcd(len(ranks), len(others))  # replicas meet those of their own turn
    met = np.empty((len(groups), len(ranks)))
    for level, size in enumerate(groups):
        wanted = _groups_by_turn(ranks, size, turns)
        met[level] = _occurrences(_groups_by_turn(others, size, turns), wanted)

    shares = np.diff(met, axis=0, prepend=0.0) / (len(others) // turns)
    shares.setflags(write=False)
    return np.asarray(shares)


def _occurrences(numbers: Integers, wanted: Integers) -> Integers:
    """Return how often each of the wanted numbers occurs among others."""
    there, counts = np.unique(numbers, return_counts=True)
    nearest = np.minimum(np.searchsorted(there, wanted), len(there) - 1)
    return np.where(there[nearest] == wanted, counts[nearest], 0)


def _groups_by_turn(ranks: Ranks, size: int, turns: int) -> Integers:
    """Number the groups of `size` ranks, one for each turn, and return that of each rank."""
    if isinstance(ranks, range):
        # An array of thousands of its numbers would take long.
        numbers = np.arange(ranks.start, ranks.stop)
    else:
        numbers = np.asarray(ranks)
    turn = np.arange(len(ranks)) % turns
    return np.asarray(numbers // size * turns + turn)


class Loads:
    """Busy seconds of the links per microbatch, by transfers and all-reduces: arriving messages,
    and leaving ones.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.into, self.out = np.zeros((2, topology.gpus))  # each rank's own link
        # of each level
        self.shared = [np.zeros((2, topology.gpus // size)) for _, size, _, _ in topology.shared]

    def times(self, count: int) -> "Loads":
        """Return the loads of so many microbatches."""
        many = Loads(self.topology)
        many.into = self.into * count
        many.out = self.out * count
        many.shared = [each * count for each in self.shared]
        return many

    def busiest(self, ranks: Ranks) -> tuple[float, float]:
        """Return the seconds of the busiest of these ranks' links, into it and out of it."""
        own = _index(ranks)
        return float(self.into[own].max()), float(self.out[own].max())

    def add_transfer(self, source: Ranks, target: Ranks, exchange: Floats) -> float:
        """Add the messages between two stages, `Traffic.amounts`; return their mean seconds over
        the pairs of ranks.
        """
        output_bytes, gradient_bytes, outputs, gradients = map(float, exchange[:4])

        # 1. Seconds of each rank's messages, by the level at which their ends meet.
        latency_s = self.topology.latency_s[:, None]

        def seconds(ranks: Ranks, others: Ranks, shares: Floats) -> tuple[Floats, Floats]:
            rates = self.topology.message_bytes_per_s(ranks, others)
            forward_s = output_bytes / rates + outputs * latency_s
            back_s = gradient_bytes / rates + gradients * latency_s
            return (forward_s * shares).sum(axis=0), (back_s * shares).sum(axis=0)

        # 2. Each rank's own link.
        of_source = self.topology.shares(source, target)
        of_target = self.topology.shares(target, source)
        here = _index(source)
        forward_s, back_s = seconds(source, target, of_source)
        mean_s = float((forward_s + back_s).mean())
        self.out[here] += forward_s / len(source)
        self.into[here] += back_s / len(source)
        there = _index(target)
        forward_s, back_s = seconds(target, source, of_target)
        self.into[there] += forward_s / len(target)
        self.out[there] += back_s / len(target)

        # 3. The links that several ranks share.
        self._add_shared(source, of_source, received=gradient_bytes, sent=output_bytes)
        self._add_shared(target, of_target, received=output_bytes, sent=gradient_bytes)
        return mean_s

    def _add_shared(self, ranks: Ranks, shares: Floats, *, received: float, sent: float) -> None:
        """Add what these ranks receive and send, in bytes, to the links that they leave by."""
        levels = zip(self.shared, self.topology.shared, strict=True)
        for (into, out), (level, size, bandwidth, _) in levels:
            members = np.asarray(ranks) // size
            rates = bandwidth * self.topology.shared_ratio(level, ranks)

            # The share of a rank's messages that goes beyond the level below.
            leaving = shares[level:].sum(axis=0)
            s_per_byte = leaving / len(ranks) / rates
            into += np.bincount(members, s_per_byte * received, len(into))
            out += np.bincount(members, s_per_byte * sent, len(out))

    def add_ring(self, ranks: Ranks, trainable_bytes: float) -> None:
        """Add the all-reduce of a stage, once per round of r microbatches: 2(r-1)/r of the bytes
        each way.
        """
        r = len(ranks)
        own = _index(ranks)
        span, ring_bytes_per_s = self.topology.ring(ranks)
        moved_bytes = 2 * (r - 1) / (r * r) * trainable_bytes
        own_s = moved_bytes / ring_bytes_per_s
        self.into[own] += own_s
        self.out[own] += own_s
        for load, (level, size, _, bandwidth) in zip(
            self.shared, self.topology.shared, strict=True
        ):
            if level <= span:
                members = np.unique(np.asarray(ranks) // size)
                rates = bandwidth * self.topology.shared_ratio(level, (members * size).tolist())
                load[:, members] += moved_bytes / rates

    def busiest_shared(self) -> tuple[float, int, int]:
        """Return the seconds of the busiest shared link, either way, its first rank, and the first
        rank after it.
        """
        busiest = (0.0, 0, 0)
        for (_, size, _, _), load in zip(self.topology.shared, self.shared, strict=True):
            both = load.max(axis=0)
            member = int(np.argmax(both))
            if both[member] > busiest[0]:
                busiest = (float(both[member]), member * size, (member + 1) * size)
        return busiest


def _link_ratio(kind: DeviceKind, level: int) -> float:
    if kind.link_ratios is None:
        return 1.0
    return kind.link_ratios[level]


def _index(ranks: Ranks) -> slice | Integers:
    if isinstance(ranks, range):
        return slice(ranks.start, ranks.stop)
    return np.asarray(ranks)


Resource = Literal["compute", "receive", "send", "shared_link"]
Busy = dict[Resource, Floats]  # seconds per minibatch
# by (source, target) stage, as `Loads.add_transfer` takes them
Exchanges = Mapping[tuple[int, int], Floats]


def places_matter(cluster: Cluster) -> bool:
    """Return whether messages take longer between some ranks than between others."""
    return len(cluster.joined) > 1 or cluster.has_own_links


def ranks_of(stages: Sequence[Candidate], workers: Sequence[int]) -> list[Ranks]:
    """Return the ranks of each stage: its own, or consecutive ones in the order of the pipeline's
    workers.
    """
    replicas = {worker: stage.replicas for worker, stage in zip(workers, stages, strict=True)}
    ranges = rank_ranges([replicas[worker] for worker in sorted(replicas)])
    return [stage.ranks or ranges[worker] for worker, stage in zip(workers, stages, strict=True)]


@dataclass(frozen=True)
class Placement:
    """Stages on ranks of a cluster; work and exchanges are those of one microbatch."""

    topology: Topology
    works: Sequence[Work]
    ranks: Sequence[Ranks]
    exchanges: Exchanges

    def transfers(self) -> tuple[Loads, list[float]]:
        """Return the loads of all transfers, and each stage's half of the time that one
        microbatch's take.
        """
        loads = Loads(self.topology)
        halves = [0.0] * len(self.works)
        for (source, target), exchange in self.exchanges.items():
            if self.ranks[source] == self.ranks[target]:
                continue  # stages of the same workers pass values on without a message
            seconds = loads.add_transfer(self.ranks[source], self.ranks[target], exchange)
            halves[source] += seconds / 2
            halves[target] += seconds / 2

        return loads, halves

    def add_shared(self, busy: Sequence[Busy], loads: Loads, times: int) -> None:
        """Add the busiest shared link, as a resource of the stage that has most ranks on it."""
        seconds, first, end = loads.busiest_shared()
        if seconds > 0:
            inside = [sum(first <= rank < end for rank in ranks) for ranks in self.ranks]
            busy[inside.index(max(inside))]["shared_link"] = np.asarray(seconds * times)
