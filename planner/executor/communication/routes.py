"""The ways that messages take between stages, and the process groups that carry them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from planner.schedule.instructions import Instruction, Receive, ReceiveShared, Send, SendShared
from planner.workers.groups import DataGroups

Receivers = Callable[[int, Send], Sequence[int]]  # the ranks that take what a rank sends


class Lane(NamedTuple):
    """One direction between two stages on two workers; both ends have its messages in the same order."""

    sender: int  # ranks
    receiver: int
    source: int  # the earlier of the two stages
    target: int
    forward: bool  # from the earlier stage to the later
    shared: bool  # gradients of weights that both stages hold

    @property
    def tag(self) -> int:
        """The tag that tells its messages from those between other stages of the same two workers."""
        return (self.shared * 10_000 + self.source) * 10_000 + self.target


def lane_of(message: Receive | Send, rank: int) -> Lane:
    """Return the lane of a message that worker `rank` sends or receives."""
    shared = isinstance(message, (ReceiveShared, SendShared))
    if isinstance(message, Send):
        return _lane(rank, message.peer_rank, message.stage, message.peer_stage, shared)
    return _lane(message.peer_rank, rank, message.peer_stage, message.stage, shared)


@cache  # for every message, a lookup instead of a new Lane
def _lane(sender: int, receiver: int, from_stage: int, to_stage: int, shared: bool) -> Lane:
    source, target = sorted((from_stage, to_stage))
    return Lane(sender, receiver, source, target, from_stage < to_stage, shared)


def lanes_of(streams: Mapping[int, Iterable[Instruction]]) -> list[Lane]:
    """Return the lanes that the streams of all workers, by rank, send on; in an order that is the same everywhere.

    Lanes of disjoint pairs of workers stand side by side in the order (a greedy edge colouring), so that workers that
    go through it together do not wait for each other in one long chain.
    """
    found = {
        lane_of(each, rank)
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


class LinkGroups:
    """Process groups for messages; all workers make them together.

    gloo matches messages by their tags, so two groups of all workers do: one per direction, because activations and
    gradients must not queue behind each other.

    NCCL has no tags. Operations on one communicator run in the order of their calls, and match by that order alone;
    two workers agree on it for one lane only. So each lane has a group of its own, of two workers. That also keeps one
    worker's messages from queueing behind another's.

    Args:
        streams: of all workers by rank, long enough that every pair that ever exchanges messages does.
        receivers: of each message; those whom the streams name, if nothing else is said.
    """

    def __init__(
        self,
        groups: DataGroups,
        streams: Mapping[int, Iterable[Instruction]],
        receivers: Receivers = lambda _, send: (send.peer_rank,),
    ) -> None:
        self._receivers = receivers
        self._by_direction: dict[bool, dist.ProcessGroup] = {}
        self._by_lane: dict[Lane, dist.ProcessGroup] = {}
        if groups.tagged:
            self._by_direction = {forward: groups.for_collectives(None) for forward in (True, False)}
        else:
            # Making a group is a call of all workers, and NCCL connects a lane at its first use: one order for all.
            lanes = lanes_of({rank: self.copied(stream, rank) for rank, stream in streams.items()})
            self._by_lane = {lane: groups.for_messages(lane.sender, lane.receiver) for lane in lanes}

    def copied(self, stream: Iterable[Instruction], rank: int) -> Iterator[Instruction]:
        """Yield a worker's stream with a send for each receiver."""
        for each in stream:
            if isinstance(each, Send) and each.peer_rank != rank:
                yield from self.copies(each, rank)
            else:
                yield each

    def copies(self, send: Send, rank: int) -> Sequence[Send]:
        """Return what a worker sends to other workers in place of `send`: nothing, or one or several messages."""
        ranks = self._receivers(rank, send)
        return (send,) if ranks == (send.peer_rank,) else [replace(send, peer_rank=each) for each in ranks]

    def of(self, lane: Lane) -> dist.ProcessGroup:
        """Return the group of a lane's messages."""
        return self._by_direction.get(lane.forward) or self._by_lane[lane]
