"""Messages and all-reduces on their way over the links, as the executor sends them.

Messages of one kind between two stages of two workers follow one another, and one leaves only when the receiver has
room for it: `POSTED` receives are open, from the first time that the receiver comes to one. The parts of a stage's
all-reduce follow one another too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.cost.asynchronous import BUCKETS
from planner.schedule.instructions import POSTED, Receive, ReceiveShared, Send, SendActivation, SendShared
from planner.simulator.links import ClusterLinks
from planner.simulator.network import FairNetwork, Path
from planner.simulator.times import Pipeline

Arrived = Callable[[int, Send, float, float], None]  # sender's rank, message, when it left and when it is there
Reduced = Callable[[int, int, float, float], None]  # stage, round, when a part began and when it is summed
_Key = tuple[int, int, int, int, bool]


@dataclass
class _Connection:
    """Messages of one kind from a stage on one worker to a stage on another, one after the other."""

    sender: int
    path: Path
    latency_s: float
    waiting: deque[Send] = field(default_factory=deque)
    begun: int = 0
    taken: int = 0
    open: bool = False
    busy: bool = False


@dataclass
class _Ring:
    """The all-reduces of a stage: the rounds of the parts that wait."""

    path: Path
    latency_s: float
    part_bytes: float
    waiting: deque[int] = field(default_factory=deque)
    busy: bool = False


class Carrier:
    """What is on its way in one run; `arrived` and `reduced` are told what has come to its end."""

    def __init__(self, pipeline: Pipeline, arrived: Arrived, reduced: Reduced) -> None:
        self.network, self.links = FairNetwork(), ClusterLinks(pipeline.cluster)
        self._pipeline, self._arrived, self._reduced = pipeline, arrived, reduced
        self._connections: dict[_Key, _Connection] = {}
        self._rings: dict[int, _Ring] = {}
        self._overlap = pipeline.cluster.overlap

    def parts_s(self, stage: int, backward_s: float) -> list[float]:
        """When the parts of an all-reduce are ready, from the start of the last replica's backward of `backward_s`.

        All at its end where nothing overlaps.
        """
        times = self._pipeline.stages[stage]
        if not self._overlap:
            return [backward_s] * BUCKETS
        if times.ready_s and times.backward_s > 0:
            return [seconds * (backward_s / times.backward_s) for seconds in times.ready_s]
        return [backward_s * (part + 1) / BUCKETS for part in range(BUCKETS)]

    def send(self, rank: int, send: Send, now_s: float) -> None:
        """A message is ready."""
        shared = isinstance(send, SendShared)
        connection = self._connection((rank, send.stage, send.peer_rank, send.peer_stage, shared))
        connection.waiting.append(send)
        self._go_on(connection, now_s)

    def await_message(self, rank: int, receive: Receive, now_s: float) -> None:
        """A receiver has come to a message for the first time."""
        connection = self._receiving(rank, receive)
        if not connection.open:
            connection.open = True
            self._go_on(connection, now_s)

    def take(self, rank: int, receive: Receive, now_s: float) -> None:
        """A receiver has taken a message."""
        connection = self._receiving(rank, receive)
        connection.taken += 1
        self._go_on(connection, now_s)

    def reduce(self, stage: int, round_: int, now_s: float) -> None:
        """A part of an all-reduce is ready on all replicas."""
        if stage not in self._rings:
            self._rings[stage] = self._ring(stage)
        ring = self._rings[stage]
        ring.waiting.append(round_)
        if not ring.busy:
            self._begin_part(stage, ring, now_s)

    def _go_on(self, connection: _Connection, now_s: float) -> None:
        """Begin the connection's next message, if there is one and the receiver has room."""
        room = connection.open and connection.begun < connection.taken + POSTED
        if connection.busy or not connection.waiting or not room:
            return
        send = connection.waiting.popleft()
        connection.busy = True
        connection.begun += 1

        def arrive(end_s: float) -> None:
            connection.busy = False
            self._arrived(connection.sender, send, now_s, end_s + connection.latency_s)
            self._go_on(connection, end_s)

        self.network.begin(now_s, connection.path, self._size_bytes(send), arrive)

    def _begin_part(self, stage: int, ring: _Ring, now_s: float) -> None:
        round_ = ring.waiting.popleft()
        ring.busy = True

        def end(end_s: float) -> None:
            ring.busy = False
            self._reduced(stage, round_, now_s, end_s + (ring.latency_s if ring.part_bytes > 0 else 0.0))
            if ring.waiting and not ring.busy:
                self._begin_part(stage, ring, end_s)

        self.network.begin(now_s, ring.path, ring.part_bytes, end)

    def _size_bytes(self, send: Send) -> int:
        if isinstance(send, SendShared):
            return self._pipeline.shared_bytes[send.stage, send.peer_stage]
        source, target = sorted((send.stage, send.peer_stage))
        return self._pipeline.transfer_bytes[source, target][0 if isinstance(send, SendActivation) else 1]

    def _receiving(self, rank: int, receive: Receive) -> _Connection:
        shared = isinstance(receive, ReceiveShared)
        return self._connection((receive.peer_rank, receive.peer_stage, rank, receive.stage, shared))

    def _connection(self, key: _Key) -> _Connection:
        if key not in self._connections:
            self._connections[key] = _Connection(key[0], *self.links.message(key[0], key[2]))
        return self._connections[key]

    def _ring(self, stage: int) -> _Ring:
        ranks = self._pipeline.shape.ranks[stage]
        moved_bytes = 2 * (len(ranks) - 1) / len(ranks) * self._pipeline.gradient_bytes[stage]
        return _Ring(*self.links.ring(ranks), moved_bytes / BUCKETS)
