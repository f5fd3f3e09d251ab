"""Which way a message takes, as one end sees it and as both do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import count
from typing import NamedTuple

from planner.schedule.instructions import Instruction, Receive, ReceiveShared, Send, SendShared


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
    for lane in sorted(found):
        turn = next(number for number in count() if number not in taken[lane.sender] | taken[lane.receiver])
        turns[lane] = turn
        taken[lane.sender].add(turn)
        taken[lane.receiver].add(turn)
    return sorted(found, key=lambda lane: (turns[lane], lane))
