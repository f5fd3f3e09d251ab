"""The ways that messages take between stages, and the process groups that carry them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from planner.schedule.instructions import Instruction, Receive, ReceiveShared, Send, SendShared
from planner.workers.groups import DataGroups

Receivers = Callable[[int, Send], Sequence[int]]  # the ranks that take what a rank sends
Streams = Mapping[int, Iterable[Instruction]]  # of all workers, by rank


class Lane(NamedTuple):
    """One direction between two stages on two workers; both ends name it alike."""

    sender: int  # ranks
    receiver: int
    source: int  # the earlier of the two stages
    target: int
    forward: bool  # from the earlier stage to the later
    shared: bool  # gradients of weights that both stages hold


class Route(NamedTuple):
    """Messages that both ends have in the same order: one direction between two stages, to or from one peer."""

    forward: bool  # from the earlier of the two stages to the later
    sends: bool
    source: int  # the earlier of the two stages
    target: int
    peer_rank: int
    shared: bool  # gradients of weights that both stages hold

    @property
    def tag(self) -> int:
        """The tag that tells its messages from those between other stages of the same two workers."""
        return (self.shared * 10_000 + self.source) * 10_000 + self.target

    def lane(self, rank: int) -> Lane:
        """Return the lane of the messages that worker `rank` sends or receives on this route."""
        ends = (rank, self.peer_rank) if self.sends else (self.peer_rank, rank)
        return Lane(*ends, self.source, self.target, self.forward, self.shared)


def route_of(message: Receive | Send) -> Route:
    """Return the route that a message takes."""
    shared = isinstance(message, (ReceiveShared, SendShared))
    return _route(message.stage, message.peer_stage, message.peer_rank, isinstance(message, Send), shared)


@cache  # for every message, a lookup instead of a new Route
def _route(stage: int, peer_stage: int, peer_rank: int, sends: bool, shared: bool) -> Route:
    source, target = sorted((stage, peer_stage))
    return Route((stage == source) == sends, sends, source, target, peer_rank, shared)


def lanes_of(streams: Mapping[int, Iterable[Instruction]]) -> list[Lane]:
    """Return the lanes that the streams of all workers, by rank, send on; in an order that is the same everywhere.

    Lanes of disjoint pairs of workers stand side by side in the order (a greedy edge colouring), so that workers that
    go through it together do not wait for each other in one long chain.
    """
    found = {
        route_of(each).lane(rank)
        for rank, stream in streams.items()
        for each in stream
        if isinstance(each, Send) and each.peer_rank != rank
    }
    taken: defaultdict[int, set[int]] = defaultdict(set)  # turns, by rank
    turns = {}
    for lane in sorted(found):  # sets have another order in every process
        turn = next(number for number in count() if number not in taken[lane.sender] | taken[lane.receiver])
        turns[lane] = turn
        taken[lane.sender].add(turn)
        taken[lane.receiver].add(turn)
    return sorted(found, key=lambda lane: (turns[lane], lane))


@dataclass(frozen=True)
class LinkGroups:
    """Process groups for messages.

    gloo matches messages by their tags, so two groups of all workers do: one per direction, because activations and
    gradients must not queue behind each other.

    NCCL has no tags. Operations on one communicator run in the order of their calls, and match by that order alone;
    two workers agree on it for one lane only. So each lane has a group of its own, of two workers. That also keeps one
    worker's messages from queueing behind another's.
    """

    activations: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None
    by_lane: Mapping[Lane, dist.ProcessGroup] = field(default_factory=dict)
    receivers: Receivers = lambda _, send: (send.peer_rank,)

    @classmethod
    def create(cls, groups: DataGroups, streams: Callable[[], Streams], receivers: Receivers = receivers) -> LinkGroups:
        """Make the groups.

        Args:
            streams: of all workers, long enough that every pair that ever exchanges messages does.
            receivers: of each message; those whom the streams name, if nothing else is said.
        """
        if groups.tagged:
            return cls(groups.for_collectives(None), groups.for_collectives(None), receivers=receivers)
        # Making a group is a call of all workers, and NCCL connects a lane at its first use: one order for all.
        links = cls(receivers=receivers)
        lanes = lanes_of({rank: links.copied(stream, rank) for rank, stream in streams().items()})
        return replace(links, by_lane={lane: groups.for_messages(lane.sender, lane.receiver) for lane in lanes})

    def copied(self, stream: Iterable[Instruction], rank: int) -> Iterator[Instruction]:
        """Yield a worker's stream with a send for each receiver."""
        for each in stream:
            if isinstance(each, Send) and each.peer_rank != rank:
                yield from self.copies(each, rank)
            else:
                yield each

    def copies(self, send: Send, rank: int) -> Sequence[Send]:
        """Return what a worker sends to other workers in place of `send`: nothing, or one or several messages."""
        ranks = self.receivers(rank, send)
        return (send,) if ranks == (send.peer_rank,) else [replace(send, peer_rank=each) for each in ranks]

    def of(self, route: Route) -> dist.ProcessGroup:
        """Return the group of a route's messages."""
        group = self.activations if route.forward else self.gradients
        return group or self.by_lane[route.lane(dist.get_rank())]
