"""Process groups for the messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from planner.devices.groups import DataGroups
from planner.executor.communication.routes import Lane, Route, lanes_of
from planner.schedule.instructions import Instruction, Send

Receivers = Callable[[int, Send], Sequence[int]]  # the ranks that take what a rank sends
Streams = Mapping[int, Iterable[Instruction]]  # of all workers, by rank


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
            return cls(groups.of(None), groups.of(None), receivers=receivers)
        links = cls(receivers=receivers)
        lanes = lanes_of({rank: links.copied(stream, rank) for rank, stream in streams().items()})
        return replace(links, by_lane={lane: groups.between(lane.sender, lane.receiver) for lane in lanes})

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
