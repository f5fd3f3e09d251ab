"""Simulation with links as TCP shares them: whatever crosses a link at the same time gets equal parts of it.

`planner.simulator.links` lets messages and all-reduces take turns, which is quick to simulate and exact where links are
not busy. Where they are, turns couple what a network does not: one bucket of an all-reduce that waits behind a long
message holds up all replicas. Here transfers go on side by side, and two more things that the executor's network
does: the messages of one kind between two stages of two workers follow one another, and one leaves only when
the receiver has room for it (`POSTED` receives are open, from the first time that the receiver comes to one).

Rates are max-min fair (Bertsekas & Gallager 1992, section 6.5.2) and change whenever a transfer begins or ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from planner.cost import BUCKETS, POSTED
from planner.plan_file import Plan
from planner.schedule.instructions import Receive, Send, SendActivation, matching_receive
from planner.schedule.shape import shape_of
from planner.simulator.engine import Engine, StageTimes
from planner.timeline import Event
from planner.topology import Topology

Direction = Hashable  # of a link
_LEAST_BYTES = 1e-6  # an empty message ends at once, but it ends


@dataclass(eq=False)
class _Transfer:
    """Bytes on their way over all of `links` at once."""

    links: tuple[Direction, ...]
    left_bytes: float
    done: Callable[[float], None]
    bytes_per_s: float = 0.0


class FairNetwork:
    """Transfers in progress, and their rates.

    Attributes:
        bytes_per_s: of each direction of a link.
    """

    def __init__(self) -> None:
        self.bytes_per_s: dict[Direction, float] = {}
        self._transfers: list[_Transfer] = []
        self._now_s = 0.0

    @property
    def next_s(self) -> float:
        """When the next transfer ends, if none begins before; infinite without any."""
        return self._now_s + min((t.left_bytes / t.bytes_per_s for t in self._transfers), default=math.inf)

    def begin(
        self, now_s: float, links: tuple[Direction, ...], size_bytes: float, done: Callable[[float], None]
    ) -> None:
        """Put `size_bytes` on the links; `done` is called with the time at which they are over."""
        self._advance(now_s)
        self._transfers.append(_Transfer(links, max(size_bytes, _LEAST_BYTES), done))
        self._share()

    def finish(self) -> None:
        """Go on to `next_s`, and end what ends then."""
        first = min(self._transfers, key=lambda t: t.left_bytes / t.bytes_per_s)
        self._advance(self.next_s)
        self._transfers.remove(first)
        self._share()
        first.done(self._now_s)

    def _advance(self, now_s: float) -> None:
        for transfer in self._transfers:
            transfer.left_bytes = max(0.0, transfer.left_bytes - transfer.bytes_per_s * (now_s - self._now_s))
        self._now_s = now_s

    def _share(self) -> None:
        """The link with the smallest equal part fixes the rates of its transfers, and so on with what is left."""
        room = dict(self.bytes_per_s)
        users: dict[Direction, list[_Transfer]] = {}
        for transfer in self._transfers:
            for link in transfer.links:
                users.setdefault(link, []).append(transfer)
        while users:
            tightest = min(users, key=lambda link: room[link] / len(users[link]))
            part = room[tightest] / len(users[tightest])
            for transfer in users.pop(tightest):
                transfer.bytes_per_s = part
                for link in transfer.links:
                    if link in users:
                        room[link] -= part
                        users[link].remove(transfer)
                        if not users[link]:
                            del users[link]


@dataclass
class _Connection:
    """Messages of one kind from a stage on one worker to a stage on another, one after the other."""

    links: tuple[Direction, ...]
    latency_s: float
    waiting: deque[tuple[Send, float]] = field(default_factory=deque)  # and since when
    begun: int = 0
    taken: int = 0
    open: bool = False
    busy: bool = False


class FairEngine(Engine):
    """One run of `plan` on the links of its cluster; `completions` are the last stage's backwards."""

    def __init__(
        self, plan: Plan, stages: Sequence[StageTimes], minibatches: int, events: list[Event] | None = None
    ) -> None:
        super().__init__(shape_of(plan), stages, _EqualBuckets(stages, plan.cluster.overlap), minibatches, events)
        self._plan = plan
        self._topology = Topology(plan.cluster)
        self._network = FairNetwork()
        self._bytes = {(t.source, t.target): (t.output_bytes, t.gradient_bytes) for t in plan.transfers}
        self._connections: dict[tuple[int, int, int, int], _Connection] = {}
        self._queues: list[deque[int]] = [deque() for _ in plan.stages]  # rounds of the buckets that wait
        self._reducing = [False] * len(plan.stages)
        own = plan.cluster.joined[0].bandwidth_bytes_per_s
        for rank in self.streams:
            self._network.bytes_per_s["out", rank] = self._network.bytes_per_s["in", rank] = own
        for number, (_, size, bandwidth, _) in enumerate(self._topology.shared):
            for member in range(plan.cluster.gpus // size):
                for way in ("out", "in"):
                    self._network.bytes_per_s[way, number, member] = bandwidth
        self._rings = [self._ring(stage) for stage in range(len(plan.stages))]

    def run(self) -> bool:
        """To the end of all streams; False when the workers came to wait for each other."""
        while True:
            ready_s = self.ready[0][0] if self.ready else math.inf
            transferred_s = self._network.next_s
            if transferred_s <= ready_s:
                if math.isinf(transferred_s):
                    return not any(self.next.values())
                self._network.finish()
            else:
                self._step()

    def _step(self) -> None:
        now_s, rank = heapq.heappop(self.ready)
        if rank < 0:
            self._reduce(*self.buckets[-rank - 1], now_s)
            return
        instruction = self.next[rank]
        if instruction is not None and self._execute(rank, instruction):
            self._proceed(rank)

    def _send(self, rank: int, send: Send) -> None:
        if send.peer_rank == rank:
            super()._send(rank, send)
            return
        connection = self._connection(rank, send.stage, send.peer_rank, send.peer_stage)
        connection.waiting.append((send, self.clock[rank]))
        self._go_on(connection, rank, self.clock[rank])

    def _receive(self, rank: int, receive: Receive) -> bool:
        if receive.peer_rank == rank:
            return super()._receive(rank, receive)
        connection = self._connection(receive.peer_rank, receive.peer_stage, rank, receive.stage)
        connection.open = True
        received = super()._receive(rank, receive)
        connection.taken += received
        self._go_on(connection, receive.peer_rank, self.clock[rank])
        return received

    def _go_on(self, connection: _Connection, sender: int, now_s: float) -> None:
        """Begin the connection's next message, if there is one and the receiver has room."""
        room = connection.open and connection.begun < connection.taken + POSTED
        if connection.busy or not connection.waiting or not room:
            return
        send, _ = connection.waiting.popleft()
        connection.busy, connection.begun = True, connection.begun + 1
        source, target = sorted((send.stage, send.peer_stage))
        size_bytes = self._bytes[source, target][0 if isinstance(send, SendActivation) else 1]

        def arrive(end_s: float) -> None:
            connection.busy = False
            self._arrive(sender, send, now_s, end_s + connection.latency_s)
            self._go_on(connection, sender, end_s)

        self._network.begin(now_s, connection.links, size_bytes, arrive)

    def _arrive(self, sender: int, send: Send, start_s: float, end_s: float) -> None:
        key = send.peer_rank, matching_receive(send, sender)
        self.arrived[key] = end_s
        if self.events is not None:
            self._record_message(sender, send, start_s, end_s)
        if key in self.awaited:
            self.awaited.remove(key)
            heapq.heappush(self.ready, (max(self.clock[send.peer_rank], end_s), send.peer_rank))

    def _reduce(self, stage: int, round_: int, now_s: float) -> None:
        """A bucket is ready: it goes behind those of its stage that are on their way."""
        self._queues[stage].append(round_)
        if not self._reducing[stage]:
            self._begin_bucket(stage, now_s)

    def _begin_bucket(self, stage: int, now_s: float) -> None:
        round_ = self._queues[stage].popleft()
        self._reducing[stage] = True
        ring, of = self.rings[stage, round_], self._plan.stages[stage]
        ring.start_s = now_s if ring.start_s is None else ring.start_s
        moved_bytes = 2 * (of.replicas - 1) / of.replicas * of.memory.gradients_bytes / BUCKETS
        links, latency_s = self._rings[stage]

        def end(end_s: float) -> None:
            self._reducing[stage] = False
            self._bucket_done(stage, round_, end_s + latency_s)
            if self._queues[stage]:
                self._begin_bucket(stage, end_s)

        self._network.begin(now_s, links, moved_bytes, end)

    def _bucket_done(self, stage: int, round_: int, end_s: float) -> None:
        ring = self.rings[stage, round_]
        ring.left -= 1
        if ring.left:
            return
        ring.done_s = end_s
        if self.events is not None:
            assert ring.start_s is not None
            for rank in self.shape.ranks[stage]:
                self.events.append(Event(rank, "all_reduce", stage, round_, 0, ring.start_s, end_s))
        for rank in ring.waiting:
            heapq.heappush(self.ready, (max(self.clock[rank], end_s), rank))

    def _connection(self, rank: int, stage: int, peer: int, peer_stage: int) -> _Connection:
        key = rank, stage, peer, peer_stage
        if key not in self._connections:
            level = int(self._topology.level(rank, peer))
            shared = self._shared(level, (("out", rank), ("in", peer)))
            links: tuple[Direction, ...] = (("out", rank), ("in", peer), *shared)
            self._connections[key] = _Connection(links, float(self._topology.latency_s[level]))
        return self._connections[key]

    def _ring(self, stage: int) -> tuple[tuple[Direction, ...], float]:
        """What a stage's all-reduce crosses, a limit of its own among it, and the latency of a bucket."""
        ranks = self._plan.stages[stage].ranks
        span = self._topology.span(range(min(ranks), max(ranks) + 1))
        link = self._topology.link(span)
        self._network.bytes_per_s["ring", stage] = link.ring_bytes_per_s
        own = [(way, rank) for rank in ranks for way in ("out", "in")]
        return (("ring", stage), *own, *self._shared(span, own)), 2 * (len(ranks) - 1) * link.latency_s

    def _shared(self, level: int, ends: Sequence[tuple[str, int]]) -> list[Direction]:
        """The shared links on the way between ends that meet at `level`, each once."""
        return list(
            dict.fromkeys(
                (way, number, rank // size)
                for number, (lowest, size, _, _) in enumerate(self._topology.shared)
                if lowest <= level
                for way, rank in ends
            )
        )


class _EqualBuckets:
    """When the parts of an all-reduce are ready; the rest of what engines ask of links, this one does itself."""

    def __init__(self, stages: Sequence[StageTimes], overlap: bool) -> None:
        self._stages, self._overlap = stages, overlap

    def buckets_s(self, stage: int) -> Sequence[float]:
        """Equal parts of the backward; all at its end where nothing overlaps."""
        shares = [(part + 1) / BUCKETS if self._overlap else 1.0 for part in range(BUCKETS)]
        return [share * self._stages[stage].backward_s for share in shares]

    def send(self, send: Send, rank: int, now_s: float) -> tuple[float, float]:
        raise AssertionError(send)

    def reduce(self, stage: int, now_s: float) -> tuple[float, float]:
        raise AssertionError(stage)
