"""The links of a cluster as resources: each device's own, and those that the devices of a server share, each direction.

What a message crosses, and how long it keeps what busy, is as in `planner.topology`: the own links of both its ends
for its bytes at the slowest bandwidth on the way and a latency; the shared links on the way for its bytes at theirs. It
goes when all of them are free, in the order of the sends. An all-reduce crosses the links of all its replicas in
buckets, each of which takes its turn on every link by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cluster import Cluster
from planner.cost import BUCKETS, ring_all_reduce_s
from planner.plan_file import Plan, Stage
from planner.schedule.instructions import Send, SendActivation, SendShared
from planner.simulator.engine import StageTimes
from planner.timeline import LinkUse
from planner.topology import Topology


class _Direction:
    """One direction of a link, and what it carried."""

    def __init__(self, who: str, rank: int | None, sends: bool, bandwidth_bytes_per_s: float) -> None:
        does = ("send", "receive")[not sends] + "s" * (rank is not None)
        self.name, self.rank, self.sends = f"{who} {does}", rank, sends
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.free_s = 0.0
        self.start_s: list[float] = []
        self.end_s: list[float] = []

    def carry(self, start: float, seconds: float) -> float:
        """Be busy from `start` on; returns the end."""
        self.free_s = start + seconds
        if seconds > 0:
            self.start_s.append(start)
            self.end_s.append(self.free_s)
        return self.free_s

    @property
    def use(self) -> LinkUse:
        """For the timeline."""
        return LinkUse(
            name=self.name,
            rank=self.rank,
            sends=self.sends,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            start_s=tuple(self.start_s),
            end_s=tuple(self.end_s),
        )


@dataclass(frozen=True)
class _Route:
    """What messages from one rank to another cross."""

    bytes_per_s: float
    latency_s: float
    own: tuple[_Direction, _Direction]
    shared: tuple[_Direction, ...]


@dataclass(frozen=True)
class _Ring:
    """What a bucket of a stage's all-reduce takes: in all, and of each link that it crosses."""

    seconds: float
    ready_s: tuple[float, ...]
    busy: tuple[tuple[_Direction, float], ...]


class ClusterLinks:
    """All links that a plan uses.

    Args:
        plan: with its cluster.
        times: of its stages.
    """

    def __init__(self, plan: Plan, times: Sequence[StageTimes]) -> None:
        self._topology = Topology(plan.cluster)
        self._overlap = plan.cluster.overlap
        self._bytes = {(t.source, t.target): (t.output_bytes, t.gradient_bytes) for t in plan.transfers}
        self._shared_bytes = {ends: s.gradient_bytes for s in plan.shared for ends in (s.stages, s.stages[::-1])}
        own = _own_bandwidth(plan.cluster)
        ranks = sorted({rank for stage in plan.stages for rank in stage.ranks})
        self._own = {
            rank: (_Direction(f"worker {rank}", rank, True, own), _Direction(f"worker {rank}", rank, False, own))
            for rank in ranks
        }
        self._shared: dict[tuple[int, int], tuple[_Direction, _Direction]] = {}
        self._routes: dict[tuple[int, int], _Route] = {}
        self._rings = [self._ring(stage, each.backward_s) for stage, each in zip(plan.stages, times, strict=True)]
        self._summed_s = [0.0] * len(plan.stages)

    def uses(self) -> Iterator[LinkUse]:
        """What every link carried; of the shared ones those that carried something."""
        for pair in (*self._own.values(), *(self._shared[key] for key in sorted(self._shared))):
            for direction in pair:
                yield direction.use

    def send(self, send: Send, rank: int, now_s: float) -> tuple[float, float]:
        """As soon as all links on the way are free."""
        if isinstance(send, SendShared):
            size = self._shared_bytes[send.stage, send.peer_stage]
        elif isinstance(send, SendActivation):
            size = self._bytes[send.stage, send.peer_stage][0]
        else:
            size = self._bytes[send.peer_stage, send.stage][1]
        route = self._route(rank, send.peer_rank)
        outgoing, incoming = route.own
        start = max(now_s, outgoing.free_s, incoming.free_s)
        for link in route.shared:
            start = max(start, link.free_s)
        for link in route.shared:
            link.carry(start, size / link.bandwidth_bytes_per_s)
        seconds = size / route.bytes_per_s + route.latency_s
        incoming.carry(start, seconds)
        return start, outgoing.carry(start, seconds)

    def buckets_s(self, stage: int) -> Sequence[float]:
        """Equal parts of the backward; all at its end where nothing overlaps."""
        return self._rings[stage].ready_s

    def reduce(self, stage: int, now_s: float) -> tuple[float, float]:
        """After the bucket before it, and as soon as each link is free."""
        ring = self._rings[stage]
        start = max(now_s, self._summed_s[stage])
        end = start + ring.seconds
        for link, seconds in ring.busy:
            end = max(end, link.carry(max(start, link.free_s), seconds))
        self._summed_s[stage] = end
        return start, end

    def _route(self, rank: int, peer: int) -> _Route:
        if (rank, peer) not in self._routes:
            level = int(self._topology.level(rank, peer))
            link = self._topology.link(level)
            shared = tuple(
                self._member(number, at // size)[direction]
                for number, (lowest, size, _, _) in enumerate(self._topology.shared)
                if lowest <= level
                for direction, at in ((0, rank), (1, peer))
            )
            own = self._own[rank][0], self._own[peer][1]
            self._routes[rank, peer] = _Route(link.bandwidth_bytes_per_s, link.latency_s, own, shared)
        return self._routes[rank, peer]

    def _member(self, number: int, member: int) -> tuple[_Direction, _Direction]:
        """Both directions of the link that the devices of a server share."""
        if (number, member) not in self._shared:
            _, size, bandwidth, _ = self._topology.shared[number]
            name = f"workers {member * size}-{(member + 1) * size - 1} together"
            self._shared[number, member] = (
                _Direction(name, None, True, bandwidth),
                _Direction(name, None, False, bandwidth),
            )
        return self._shared[number, member]

    def _ring(self, stage: Stage, backward_s: float) -> _Ring:
        ends = range(min(stage.ranks), max(stage.ranks) + 1)
        replicas, span = stage.replicas, self._topology.span(ends)
        link = self._topology.link(span)
        gradient_bytes = stage.memory.gradients_bytes
        whole_s = float(ring_all_reduce_s(gradient_bytes, replicas, link))
        moved = 2 * (replicas - 1) / replicas * gradient_bytes / BUCKETS
        busy = [(each, moved / link.ring_bytes_per_s) for rank in stage.ranks for each in self._own[rank]]
        if replicas > 1:
            for level, (lowest, size, _, bandwidth) in enumerate(self._topology.shared):
                members = sorted({rank // size for rank in stage.ranks}) if lowest <= span else []
                busy += [(each, moved / bandwidth) for member in members for each in self._member(level, member)]
        shares = [(part + 1) / BUCKETS if self._overlap else 1.0 for part in range(BUCKETS)]
        return _Ring(whole_s / BUCKETS, tuple(share * backward_s for share in shares), tuple(busy))


def _own_bandwidth(cluster: Cluster) -> float:
    """Of a device's own link: that of the innermost level."""
    return cluster.joined[0].bandwidth_bytes_per_s
