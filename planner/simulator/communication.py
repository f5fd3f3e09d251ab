"""Simulate messages and all-reduces on their way over the links, sent as the executor sends them.

Messages of one kind from one stage to another, on given workers, follow one another. The next one starts only if the
receiver has posted a receive for it: `POSTED` receives are open from the first time that the receiver asks for one. The
parts of a stage's all-reduce follow one another, too. Where the stage's optimizer is sharded, they are those of a
reduce-scatter, with half of the bytes; the all-gather after the update has the other half.

Links have two directions. A device has a link of its own, with the bandwidth of the innermost level. Beyond a group of
devices lies the next level: one link that the devices of the group share, or one for each if the level says so. A
message crosses the links of all levels up to the one where its ends meet: outwards from its sender, inwards to its
receiver. An all-reduce ring crosses the own links of all its replicas and, once each way, those of every group that it
passes through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.cost.network.topology import Topology
from planner.formats.cluster import Cluster
from planner.formats.timeline import LinkUse
from planner.schedule.instructions import POSTED, Receive, ReceiveShared, Send, SendActivation, SendShared
from planner.simulator.fair_network import FairNetwork, LinkDirection, LinkPath
from planner.simulator.pipeline_costs import PipelineCosts


@dataclass
class Round:
    """One all-reduce or all-gather of a stage.

    Replicas join an all-gather after their update, and an all-reduce with the backward that completes their gradients,
    or, without a backward in the round, when they come to the all-reduce itself.
    """

    number: int
    joined: int = 0
    passed: int = 0
    backward_start_s: float = 0.0  # of the backward that ends last
    backward_s: float = 0.0  # its length
    arrived_s: float = 0.0  # the latest replica without a backward
    parts_left: int = 0
    carried: bool = False  # stays False if there are no gradients to send
    start_s: float | None = None
    end_s: float | None = None
    waiting: list[int] = field(default_factory=list)  # ranks

    def finish_part(self, start_s: float, end_s: float) -> bool:
        """Note that a part has been carried, and return whether it was the last one."""
        self.start_s = start_s if self.start_s is None else self.start_s
        self.carried = self.carried or end_s > start_s
        self.parts_left -= 1
        if self.parts_left == 0:
            self.end_s = end_s
        return self.parts_left == 0


class AllReduces:
    """The rounds in progress, by stage and number, and how many rounds each replica of a stage has joined."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self.rounds: dict[tuple[int, int], Round] = {}
        self._replicas = [len(each) for each in ranks]
        self.joined = {(rank, stage): 0 for stage, each in enumerate(ranks) for rank in each}

    def join(self, rank: int, stage: int, start_s: float, backward_s: float, arrived_s: float = 0.0) -> Round | None:
        """Join the replica's next round; return the round if all replicas have joined it.

        Args:
            start_s, backward_s: start and length of its backward; 0 without one.
            arrived_s: when a replica without a backward came to the all-reduce.
        """
        number = self.joined[rank, stage]
        self.joined[rank, stage] += 1
        joined = self.rounds.setdefault((stage, number), Round(number))
        joined.joined += 1
        if start_s + backward_s >= joined.backward_start_s + joined.backward_s:
            joined.backward_start_s, joined.backward_s = start_s, backward_s
        joined.arrived_s = max(joined.arrived_s, arrived_s)
        return joined if joined.joined == self._replicas[stage] else None

    def leave(self, stage: int, number: int) -> None:
        """Note that a replica has passed the all-reduce; the last one closes the round."""
        left = self.rounds[stage, number]
        left.passed += 1
        if left.passed == self._replicas[stage]:
            del self.rounds[stage, number]


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


# Told of a message: the sender's rank, the message, when it started and when it arrived.
OnArrival = Callable[[int, Send, float, float], None]
# Told of a part of a collective: the collective, its round, when the part started and when it was over.
OnPart = Callable[["Collective", int, float, float], None]
_Key = tuple[int, int, int, int, bool]  # sender's rank and stage, receiver's rank and stage, whether of shared weights


class Collective(NamedTuple):
    """What the replicas of a stage do together once per round: an all-reduce or reduce-scatter, or an all-gather."""

    stage: int
    gathers: bool = False


@dataclass
class _Connection:
    """Messages of one kind from a stage on one worker to a stage on another."""

    sender: int
    path: LinkPath
    latency_s: float
    waiting: deque[Send] = field(default_factory=deque)
    started: int = 0
    taken: int = 0
    open: bool = False  # the receiver has asked for a first message
    busy: bool = False


@dataclass
class _Ring:
    """A collective of a stage; `waiting` has the round and the share of each part that has not started."""

    path: LinkPath
    latency_s: float
    moved_bytes: float
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    busy: bool = False


class Communication:
    """The messages and all-reduces of one simulation.

    Attributes:
        network: on which they share links.
        links: of the cluster, with what each carried.
        posted: whether all receives are open from the beginning, as in every minibatch but the first.
    """

    def __init__(self, costs: PipelineCosts, on_arrival: OnArrival, on_part: OnPart) -> None:
        self.network, self.links = FairNetwork(), ClusterLinks(costs.cluster)
        self._costs, self._on_arrival, self._on_part = costs, on_arrival, on_part
        self.posted = False
        self._connections: dict[_Key, _Connection] = {}
        self._rings: dict[Collective, _Ring] = {}

    def parts(self, stage: int, backward_s: float) -> list[tuple[float, float]]:
        """List when each part of an all-reduce is ready, from the start of the last replica's backward, and its share.

        Without overlap all of them wait for the backward's end.
        """
        if not self._costs.cluster.overlap:
            return [(backward_s, 1.0)]
        return list(zip(*self._costs.stages[stage].buckets(backward_s), strict=True))

    def send(self, rank: int, send: Send, now_s: float) -> None:
        """Queue a message."""
        shared = isinstance(send, SendShared)
        connection = self._connection((rank, send.stage, send.peer_rank, send.peer_stage, shared))
        connection.waiting.append(send)
        self._start_message(connection, now_s)

    def open(self, rank: int, receive: Receive, now_s: float) -> None:
        """Post the receives of a connection, if they are not."""
        connection = self._receiving(rank, receive)
        if not connection.open:
            connection.open = True
            self._start_message(connection, now_s)

    def take(self, rank: int, receive: Receive, now_s: float) -> None:
        """Take an arrived message, which makes room for another one."""
        connection = self._receiving(rank, receive)
        connection.taken += 1
        self._start_message(connection, now_s)

    def start_part(self, collective: Collective, round_: int, share: float, now_s: float) -> None:
        """Queue a part of a collective, of this share of its bytes, that is ready on all replicas."""
        if collective not in self._rings:
            self._rings[collective] = self._ring(collective)
        ring = self._rings[collective]
        ring.waiting.append((round_, share))
        self._start_part(collective, ring, now_s)

    def _start_message(self, connection: _Connection, now_s: float) -> None:
        """Start the connection's next message, if there is one and the receiver has room."""
        room = connection.open and connection.started < connection.taken + POSTED
        if connection.busy or not connection.waiting or not room:
            return
        send = connection.waiting.popleft()
        connection.busy = True
        connection.started += 1

        def ended(end_s: float) -> None:
            connection.busy = False
            # Latency delays the arrival, but does not occupy the link: the next message can start at once.
            self._on_arrival(connection.sender, send, now_s, end_s + connection.latency_s)
            self._start_message(connection, end_s)

        self.network.start(now_s, connection.path, self._size_bytes(send), ended)

    def _start_part(self, collective: Collective, ring: _Ring, now_s: float) -> None:
        """Start the ring's next part, if there is one."""
        if ring.busy or not ring.waiting:
            return
        round_, share = ring.waiting.popleft()
        size_bytes = share * ring.moved_bytes
        ring.busy = True

        def ended(end_s: float) -> None:
            ring.busy = False
            self._on_part(collective, round_, now_s, end_s + (ring.latency_s if size_bytes > 0 else 0.0))
            self._start_part(collective, ring, end_s)

        self.network.start(now_s, ring.path, size_bytes, ended)

    def _size_bytes(self, send: Send) -> int:
        if isinstance(send, SendShared):
            return self._costs.shared_bytes[send.stage, send.peer_stage]
        source, target = sorted((send.stage, send.peer_stage))
        return self._costs.transfer_bytes[source, target][0 if isinstance(send, SendActivation) else 1]

    def _receiving(self, rank: int, receive: Receive) -> _Connection:
        shared = isinstance(receive, ReceiveShared)
        return self._connection((receive.peer_rank, receive.peer_stage, rank, receive.stage, shared))

    def _connection(self, key: _Key) -> _Connection:
        if key not in self._connections:
            self._connections[key] = _Connection(key[0], *self.links.message(key[0], key[2]), open=self.posted)
        return self._connections[key]

    def gather_s(self, stage: int) -> float:
        """Return the seconds of a stage's all-gather if nothing else is on its links; 0 if its optimizer is whole."""
        if not self._costs.stages[stage].sharded:
            return 0.0
        ring = self._ring(Collective(stage, gathers=True))
        return ring.moved_bytes / ring.path.bytes_per_s + ring.latency_s

    def _ring(self, collective: Collective) -> _Ring:
        ranks, costs = self._costs.shape.ranks[collective.stage], self._costs.stages[collective.stage]
        path, latency_s = self.links.ring(ranks)
        reduced_bytes = costs.gathered_bytes if collective.gathers else costs.reduced_bytes
        moved_bytes = 2 * (len(ranks) - 1) / len(ranks) * reduced_bytes
        return _Ring(path, latency_s / 2 if costs.sharded else latency_s, moved_bytes)
