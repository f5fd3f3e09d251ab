"""Simulate messages and all-reduces on their way over the links, sent as the executor sends them.

Messages of one kind from one stage to another, on given workers, follow one another, as do the
parts of a stage's all-reduce. The next message starts only if the receiver has posted a receive for
it: `POSTED` receives are open from the first time that the receiver asks for one.

A message crosses the links of all levels up to the one where its ends meet: outwards from its
sender, inwards to its receiver. An all-reduce ring crosses the own links of all its replicas and,
once each way, those of every group that it passes through.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from planner.cost.network.topology import Topology
from planner.formats.cluster import Cluster
from planner.formats.timeline import LinkUse
from planner.schedule.instructions import (
    POSTED,
    Receive,
    ReceiveShared,
    Send,
    SendActivation,
    SendShared,
)
from planner.simulator.fair_network import FairNetwork, LinkDirection, LinkPath
from planner.simulator.pipeline_costs import PipelineCosts


class ClusterLinks:
    """The links of a cluster, made when a path first needs them."""

    def __init__(self, cluster: Cluster) -> None:
        self.topology = Topology(cluster)
        self._bandwidths = [level.bandwidth_bytes_per_s for level in cluster.joined]
        # per level, the number of ranks that share a link
        self._sharers = [1] * len(self._bandwidths)
        for number, size, _, _ in self.topology.shared:
            self._sharers[number] = size
        # By level, number among the level's links, and whether it leads away from the workers that
        # share it.
        self._links: dict[tuple[int, int, bool], LinkDirection] = {}

    def message(self, rank: int, peer: int) -> tuple[LinkPath, float]:
        """Return the links that a message crosses, and its latency."""
        level = int(self.topology.level(rank, peer))
        links = []
        for number in range(level + 1):
            links.append(self._link(number, rank, True))
            links.append(self._link(number, peer, False))

        slowest = min(link.bytes_per_s for link in links)
        return LinkPath(tuple(links), slowest), float(self.topology.latency_s[level])

    def ring(self, ranks: Sequence[int], members: Collection[int]) -> tuple[LinkPath, float]:
        """Return the links of some members that an all-reduce over `ranks` crosses, and its
        latency: that of 2(r-1) steps.
        """
        span = self.topology.span(ranks)
        links: dict[LinkDirection, None] = {}
        for number in range(span + 1):
            for rank in members:
                links[self._link(number, rank, True)] = None
                links[self._link(number, rank, False)] = None

        link = self.topology.link(span, ranks)
        steps = 2 * (len(ranks) - 1)
        return LinkPath(tuple(links), link.ring_bytes_per_s), steps * link.latency_s

    def own(self, rank: int) -> tuple[LinkDirection, ...]:
        """Return both directions of a rank's own link."""
        return self._link(0, rank, True), self._link(0, rank, False)

    def uses(self, ranks: Sequence[int]) -> Iterator[LinkUse]:
        """Yield how every link was used."""
        for rank in sorted(ranks):
            yield self._link(0, rank, True).use(f"worker {rank} sends", rank, True)
            yield self._link(0, rank, False).use(f"worker {rank} receives", rank, False)

        for level, member, sends in sorted(self._links):
            link = self._links[level, member, sends]
            if level > 0 and link.busy:
                yield link.use(self._name(level, member, sends), None, sends)

    def _name(self, level: int, member: int, sends: bool) -> str:
        """Return what workers do on a link that joins them with others."""
        does = "receive"
        if sends:
            does = "send"
        size = self._sharers[level]
        if size == 1:
            return f"worker {member} beyond its group {does}s"
        first = member * size
        return f"workers {first}-{first + size - 1} together {does}"

    def _link(self, level: int, rank: int, sends: bool) -> LinkDirection:
        key = level, rank // self._sharers[level], sends
        if key not in self._links:
            rate = self._bandwidths[level] * self.topology.link_ratio(level, rank)
            self._links[key] = LinkDirection(rate)
        return self._links[key]


@dataclass
class _Queue:
    """What follows one another over one path: messages of one kind between two stages, or parts of
    all-reduces.
    """

    path: LinkPath
    latency_s: float
    # How many may start: the receiver's posted receives, of which it has asked for none where this
    # is None.
    room: float | None = math.inf
    # Bytes, seconds of latency, and who is told when they started and arrived.
    waiting: deque[tuple[float, float, Callable[[float, float], None]]] = field(
        default_factory=deque
    )
    busy: bool = False


@dataclass
class Round:
    """One round of a collective: who has joined, and when its parts may start."""

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


@dataclass
class Collective:
    """What the replicas of a stage do together once per round: an all-reduce or reduce-scatter, or
    an all-gather.

    Replicas join an all-gather after their update, and an all-reduce with the backward that
    completes their gradients, or, without a backward in the round, when they come to the all-reduce
    itself.
    """

    stage: int
    gathers: bool
    joined: dict[int, int]  # how many rounds each rank has joined
    moved_bytes: float
    queue: _Queue
    rounds: dict[int, Round] = field(default_factory=dict)  # those in progress, by number

    def join(self, rank: int, start_s: float, backward_s: float, arrived_s: float) -> Round | None:
        """Let a replica join its next round; return the round when all have joined."""
        number = self.joined[rank]
        self.joined[rank] += 1
        joined = self.rounds.setdefault(number, Round(number))
        joined.joined += 1
        if start_s + backward_s >= joined.backward_start_s + joined.backward_s:
            joined.backward_start_s = start_s
            joined.backward_s = backward_s

        joined.arrived_s = max(joined.arrived_s, arrived_s)
        if joined.joined == len(self.joined):
            return joined
        return None

    def leave(self, number: int) -> None:
        """Note that a replica has passed a round, which is forgotten when all have."""
        self.rounds[number].passed += 1
        if self.rounds[number].passed == len(self.joined):
            del self.rounds[number]


class Communication:
    """The messages and all-reduces of one simulation, which is told of arrived messages and of
    rounds that are over.
    """

    def __init__(
        self,
        costs: PipelineCosts,
        on_arrival: Callable[[int, Send, float, float], None],
        on_round: Callable[[Collective, Round], None],
        workers: Collection[int] | None = None,
    ) -> None:
        self.network = FairNetwork()
        self.links = ClusterLinks(costs.cluster)
        self._costs = costs
        self._on_arrival = on_arrival
        self._on_round = on_round
        self._workers = workers  # that take part, for all others; None: each for itself
        # whether all receives are open from the beginning, as in every minibatch but the first
        self.posted = False
        # By the sender's rank and stage, the receiver's rank and stage, and whether of shared
        # weights.
        self._queues: dict[tuple[int, int, int, int, bool], _Queue] = {}
        self._collectives: dict[tuple[int, bool], Collective] = {}

    def collective(self, stage: int, gathers: bool = False) -> Collective:
        """Return the all-reduce of a stage, or its all-gather."""
        if (stage, gathers) not in self._collectives:
            ranks = self._costs.shape.ranks[stage]
            costs = self._costs.stages[stage]
            members = [rank for rank in ranks if self._workers is None or rank in self._workers]
            path, latency_s = self.links.ring(ranks, members)
            moved_bytes = (
                2
                * (len(ranks) - 1)
                / len(ranks)
                * (costs.gathered_bytes if gathers else costs.reduced_bytes)
            )
            queue = _Queue(path, latency_s / (1 + costs.sharded))
            self._collectives[stage, gathers] = Collective(
                stage, gathers, dict.fromkeys(members, 0), moved_bytes, queue
            )

        return self._collectives[stage, gathers]

    def gather_s(self, stage: int) -> float:
        """Return the seconds of a stage's all-gather if nothing else is on its links; 0 if its
        optimizer is whole.
        """
        if not self._costs.stages[stage].sharded:
            return 0.0
        gather = self.collective(stage, gathers=True)
        return gather.moved_bytes / gather.queue.path.bytes_per_s + gather.queue.latency_s

    def send(self, rank: int, send: Send, now_s: float) -> None:
        """Queue a message."""
        shared = isinstance(send, SendShared)
        size_bytes = self._message_bytes(send)
        queue = self._queue(rank, send.stage, send.peer_rank, send.peer_stage, shared)
        arrival = partial(self._on_arrival, rank, send)
        queue.waiting.append((size_bytes, queue.latency_s, arrival))
        self._start(queue, now_s)

    def _message_bytes(self, send: Send) -> float:
        """Return the bytes of a message: costs are by the earlier and the later stage."""
        costs = self._costs
        forward = isinstance(send, SendActivation)
        ends = (send.peer_stage, send.stage)
        if forward:
            ends = (send.stage, send.peer_stage)
        if isinstance(send, SendShared):
            return costs.shared_bytes[ends]

        size_bytes = costs.transfer_bytes[ends][not forward]
        return size_bytes * costs.factor(costs.transfer_shares.get(ends, ()), send.unit)

    def exchange(
        self,
        rank: int,
        size_bytes: float,
        rate: float,
        now_s: float,
        on_end: Callable[[float], None],
    ) -> None:
        """Exchange bytes between the ranks of a worker, each over its own link, both ways."""
        self.network.start(now_s, LinkPath(self.links.own(rank), rate), size_bytes, on_end)

    def open(self, rank: int, receive: Receive, now_s: float) -> None:
        """Let the sender of a worker's first receive begin, as if it had posted several."""
        queue = self._receiving(rank, receive)
        if queue.room is None:
            queue.room = POSTED
            self._start(queue, now_s)

    def take(self, rank: int, receive: Receive, now_s: float) -> None:
        """Let the sender go on: a worker has taken a message."""
        queue = self._receiving(rank, receive)
        queue.room = (queue.room or 0) + 1
        self._start(queue, now_s)

    def start_part(self, collective: Collective, round_: Round, share: float, now_s: float) -> None:
        """Queue a part of a round, of this share of its bytes, that is ready on all replicas."""

        def arrived(start_s: float, end_s: float) -> None:
            if round_.start_s is None:
                round_.start_s = start_s
            round_.carried |= end_s > start_s
            round_.parts_left -= 1
            if round_.parts_left == 0:
                round_.end_s = end_s
                self._on_round(collective, round_)

        size_bytes = share * collective.moved_bytes
        queue = collective.queue
        queue.waiting.append((size_bytes, queue.latency_s if size_bytes > 0 else 0.0, arrived))
        self._start(queue, now_s)

    def _start(self, queue: _Queue, now_s: float) -> None:
        if queue.busy or not queue.waiting or not queue.room:
            return
        size_bytes, latency_s, arrived = queue.waiting.popleft()
        queue.busy = True
        queue.room -= 1

        def ended(end_s: float) -> None:
            queue.busy = False
            # Latency delays the arrival, but does not occupy the link: the next one can start at
            # once.
            arrived(now_s, end_s + latency_s)
            self._start(queue, end_s)

        self.network.start(now_s, queue.path, size_bytes, ended)

    def _receiving(self, rank: int, receive: Receive) -> _Queue:
        shared = isinstance(receive, ReceiveShared)
        return self._queue(receive.peer_rank, receive.peer_stage, rank, receive.stage, shared)

    def _queue(
        self, rank: int, stage: int, peer_rank: int, peer_stage: int, shared: bool
    ) -> _Queue:
        key = rank, stage, peer_rank, peer_stage, shared
        if key not in self._queues:
            self._queues[key] = _Queue(
                *self.links.message(rank, peer_rank), POSTED if self.posted else None
            )
        return self._queues[key]
