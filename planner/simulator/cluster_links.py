"""The links of a cluster, one per direction, and the paths of messages and all-reduces over them.

A device has a link of its own, with the bandwidth of the innermost level. Beyond a group of devices lies the next
level: one link that the devices of the group share, or one for each if the level says so. A message crosses the links
of all levels up to the one where its ends meet: outwards from its sender, inwards to its receiver. An all-reduce ring
crosses the own links of all its replicas and, once each way, those of every group that it passes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.cost.network.topology import Topology
from planner.formats.cluster import Cluster
from planner.formats.timeline import LinkUse
from planner.simulator.fair_network import LinkDirection, LinkPath


class ClusterLinks:
    """The links of `cluster`, made when a path first needs them."""

    def __init__(self, cluster: Cluster) -> None:
        self.topology = Topology(cluster)
        self._bandwidths = [level.bandwidth_bytes_per_s for level in cluster.joined]
        self._sharers = [1] * len(self._bandwidths)  # per level, the number of ranks that share a link
        for number, size, _, _ in self.topology.shared:
            self._sharers[number] = size
        # By level, number among the level's links, and whether it leads away from the workers that share it.
        self._links: dict[tuple[int, int, bool], LinkDirection] = {}

    def message(self, rank: int, peer: int) -> tuple[LinkPath, float]:
        """Return the path of a message between two ranks, and its latency."""
        level = int(self.topology.level(rank, peer))
        ends = ((rank, True), (peer, False))
        links = tuple(self._link(number, at, sends) for number in range(level + 1) for at, sends in ends)
        return LinkPath(links, min(link.bytes_per_s for link in links)), float(self.topology.latency_s[level])

    def ring(self, ranks: Sequence[int]) -> tuple[LinkPath, float]:
        """Return the path of an all-reduce, and the latency of all its steps."""
        span = self.topology.span(range(min(ranks), max(ranks) + 1))
        link = self.topology.link(span)
        links = dict.fromkeys(
            self._link(number, rank, sends) for number in range(span + 1) for rank in ranks for sends in (True, False)
        )
        return LinkPath(tuple(links), link.ring_bytes_per_s), 2 * (len(ranks) - 1) * link.latency_s

    def uses(self, ranks: Sequence[int]) -> Iterator[LinkUse]:
        """Yield what these ranks' own links carried, then the shared links that carried something."""
        for rank in sorted(ranks):
            for sends in (True, False):
                name = f"worker {rank} {'sends' if sends else 'receives'}"
                yield _use(name, rank, sends, self._link(0, rank, sends))
        for (level, member, sends), link in sorted(self._links.items(), key=lambda item: item[0]):
            if level > 0 and link.busy:
                yield _use(self._name(level, member, sends), None, sends, link)

    def _link(self, level: int, rank: int, sends: bool) -> LinkDirection:
        key = level, rank // self._sharers[level], sends
        if key not in self._links:
            self._links[key] = LinkDirection(self._bandwidths[level])
        return self._links[key]

    def _name(self, level: int, member: int, sends: bool) -> str:
        size, does = self._sharers[level], ("receive", "send")[sends]
        if size == 1:
            return f"worker {member} beyond its group {does}s"
        return f"workers {member * size}-{(member + 1) * size - 1} together {does}"


def _use(name: str, rank: int | None, sends: bool, link: LinkDirection) -> LinkUse:
    start_s, end_s, share = zip(*link.busy, strict=True) if link.busy else ((), (), ())
    return LinkUse(
        name=name,
        rank=rank,
        sends=sends,
        bandwidth_bytes_per_s=link.bytes_per_s,
        start_s=start_s,
        end_s=end_s,
        share=share,
    )
