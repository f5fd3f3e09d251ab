"""Point-to-point messages between workers: receives are posted ahead, sends never wait.

Activations and gradients each have a process group of their own, so the two directions of a route never queue behind
each other. Source, order and size of every message follow from the plan: nothing is negotiated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from planner.executor.communication.messages import Layout, pack, unpack
from planner.executor.health.failures import ConnectionLostError
from planner.executor.run.setup import Place
from planner.schedule.instructions import (
    POSTED,
    Instruction,
    Receive,
    ReceiveShared,
    Send,
    SendShared,
    matching_receive,
)
from planner.schedule.streams import PipelineShape

LayoutOf = Callable[[Receive | Send], Layout]


@dataclass
class _Posted:
    receive: Receive
    layout: Layout
    buffer: Tensor
    work: dist.Work


class _Inbox:
    """The messages of one route, in the order of the stream."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        upcoming: Iterator[Receive],
        layout_of: LayoutOf,
        place: Place,
        ahead: int,
    ) -> None:
        self._group = group
        self._tag = tag
        self._place = place
        self._upcoming = upcoming
        self._layout_of = layout_of
        self._posted: deque[_Posted] = deque()
        self._ahead = ahead

    def post_ahead(self) -> None:
        """Post the first receives."""
        for _ in range(self._ahead):
            self.post()

    def post(self) -> None:
        """Post the next receive, if the stream has one."""
        receive = next(self._upcoming, None)
        if receive is not None:
            self._post(receive)

    def _post(self, receive: Receive) -> None:
        layout = self._layout_of(receive)
        buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, device=self._place.wire)
        work = dist.irecv(buffer, receive.peer_rank, self._group, tag=self._tag)
        assert work is not None
        self._posted.append(_Posted(receive, layout, buffer, work))

    def take(self, receive: Receive) -> dict[str, Tensor]:
        """Wait for `receive` and return its values."""
        if not self._posted:
            self._post(receive)  # nobody knew of it before
        posted = self._posted.popleft()
        assert posted.receive == receive, (posted.receive, receive)
        if self._ahead > 1:
            self.post()  # before the wait, which it is a part of: afterwards a computation would wait for it
        _wait(posted.work, receive.peer_rank)
        if self._ahead == 1:
            self.post()
        buffer = posted.buffer.to(self._place.compute)
        return unpack(posted.layout, receive.unit, buffer, f"rank {receive.peer_rank}")


@dataclass(frozen=True)
class LinkGroups:
    """Process groups for messages: one per direction, so that activations and gradients do not queue behind each other.

    gloo tells the messages of different pairs of stages apart by their tags. NCCL has none and matches messages between
    two workers by their order alone, which is the same at both ends for one pair of stages only: where two workers
    exchange the values of several pairs, as under interleaved, each pair has groups of its own.
    """

    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    own: Mapping[tuple[int, int, bool, bool], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def create(
        cls, shape: PipelineShape, new_group: Callable[[Iterable[int] | None], dist.ProcessGroup], *, tags: bool
    ) -> LinkGroups:
        """Make the groups; all workers do, in the same order.

        Args:
            shape: of the pipeline.
            new_group: makes a group of these ranks, or of all.
            tags: whether the backend tells messages apart by tags.
        """
        own = {}
        if not tags and len(shape.ranks) > shape.pipeline_length:
            for channel in shape.channels:
                ranks = sorted({*shape.ranks[channel.source], *shape.ranks[channel.target]})
                for activation in (True, False):
                    own[channel.source, channel.target, activation, False] = new_group(ranks)
        for source, target in () if tags else shape.shared:
            ranks = sorted({*shape.ranks[source], *shape.ranks[target]})
            for forward in (True, False):
                own[source, target, forward, True] = new_group(ranks)
        return cls(new_group(None), new_group(None), own)

    def of(self, route: Route) -> dist.ProcessGroup:
        """The group of a route's messages."""
        group = self.own.get((route.source, route.target, route.forward, route.shared))
        return group or (self.activations if route.forward else self.gradients)


class Links:
    """All messages of one worker.

    The messages of one kind between two stages come in the order in which both ends' streams have them; those of other
    stages between the same two workers may come in another, and have a tag of their own.

    Args:
        groups: process group of each kind of message.
        instructions: makes a copy of the worker's stream, from which the receives to post are taken.
        layout_of: buffer layout of a message.
        rank: this worker's.
        keep: transfers to one peer that may be unfinished. With as many as there can be units in flight, waiting
            for an older one never blocks: its unit has come back.
        ahead: rounds by which a stage is ahead of the slowest one that it shares weights with.
        place: where the messages are made, and where their values are needed.
    """

    def __init__(
        self,
        groups: LinkGroups,
        instructions: Callable[[], Iterable[Instruction]],
        layout_of: LayoutOf,
        *,
        rank: int,
        keep: int,
        ahead: Callable[[int], int] = lambda _: 0,
        place: Place,
    ) -> None:
        self._keep = keep
        self._ahead = ahead
        self._place = place
        self._rank = rank
        self._groups = groups
        self._instructions = instructions
        self._layout_of = layout_of
        self._sent: dict[Route, deque[tuple[dist.Work, Tensor]]] = {}
        self._inboxes: dict[Route, _Inbox] = {}
        self._within: dict[Receive, dict[str, Tensor]] = {}  # between two stages of this worker

    def receive(self, receive: Receive) -> dict[str, Tensor]:
        """The values of `receive`; waits until they are here."""
        if receive.peer_rank == self._rank:
            return self._within.pop(receive)
        return self._inbox(route_of(receive)).take(receive)

    def send(self, send: Send, values: dict[str, Tensor]) -> None:
        """Start sending `values`; returns at once."""
        if send.peer_rank == self._rank:
            # Gradients of shared weights are added up in place, by both stages.
            own = {n: value.clone() if isinstance(send, SendShared) else value for n, value in values.items()}
            self._within[matching_receive(send, self._rank)] = {n: value.detach() for n, value in own.items()}
            return
        route = route_of(send)
        if route.shared:
            # As large as weights, and one per round: no more are kept than rounds that this stage is ahead by.
            _finish(self._sent.get(route, deque()), self._ahead(send.stage), send.peer_rank)
        buffer = pack(self._layout_of(send), send.unit, values, self._place.wire)
        work = dist.isend(buffer, send.peer_rank, self._groups.of(route), tag=route.tag)
        assert work is not None
        # The buffer must live until the transfer ends, which gloo reports only to those who wait for it.
        pending = self._sent.setdefault(route, deque())
        pending.append((work, buffer))
        _finish(pending, self._keep, send.peer_rank)

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for route, pending in self._sent.items():
            _finish(pending, 0, route.peer_rank)

    def _inbox(self, route: Route) -> _Inbox:
        if route not in self._inboxes:
            upcoming = (i for i in self._instructions() if isinstance(i, Receive) and route_of(i) == route)
            ahead = 1 if route.shared else POSTED
            inbox = _Inbox(self._groups.of(route), route.tag, upcoming, self._layout_of, self._place, ahead)
            self._inboxes[route] = inbox
            inbox.post_ahead()
        return self._inboxes[route]


@dataclass(frozen=True)
class Route:
    """What keeps messages in order: one direction between two stages, from or to one peer."""

    forward: bool  # from the earlier of the two stages to the later
    sends: bool
    source: int  # the earlier of the two stages
    target: int
    peer_rank: int
    shared: bool  # gradients of weights that both stages hold

    @property
    def tag(self) -> int:
        """What tells its messages from those of other stages of the same two workers."""
        return (self.shared * 10_000 + self.source) * 10_000 + self.target


def route_of(message: Receive | Send) -> Route:
    """The route that a message takes."""
    shared = isinstance(message, (ReceiveShared, SendShared))
    return _route(message.stage, message.peer_stage, message.peer_rank, isinstance(message, Send), shared)


@cache
def _route(stage: int, peer_stage: int, peer_rank: int, sends: bool, shared: bool) -> Route:
    source, target = sorted((stage, peer_stage))
    return Route((stage == source) == sends, sends, source, target, peer_rank, shared)


def _finish(pending: deque[tuple[dist.Work, Tensor]], keep: int, peer: int) -> None:
    while len(pending) > keep:
        work, _buffer = pending.popleft()
        _wait(work, peer)


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as cause:
        raise ConnectionLostError(
            f"the connection to rank {peer} broke: {str(cause).splitlines()[0]}",
            hint="look for the first worker that failed",
        ) from cause
