"""Point-to-point messages between workers: receives are posted ahead, sends do not wait.

Source, order and size of every message follow from the plan: nothing is negotiated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from planner.devices.place import Place
from planner.errors import first_line
from planner.executor.communication.messages import Layout, pack, unpack
from planner.executor.health.failures import ConnectionLostError
from planner.schedule.instructions import (
    POSTED,
    Instruction,
    Receive,
    ReceiveShared,
    Send,
    SendShared,
    matching_receive,
)
from planner.schedule.schedule import PipelineShape

LayoutOf = Callable[[Receive | Send], Layout]


@dataclass(frozen=True)
class Route:
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


def route_of(message: Receive | Send) -> Route:
    """Return the route that a message takes."""
    shared = isinstance(message, (ReceiveShared, SendShared))
    return _route(message.stage, message.peer_stage, message.peer_rank, isinstance(message, Send), shared)


@cache  # for every message, a lookup instead of a new Route
def _route(stage: int, peer_stage: int, peer_rank: int, sends: bool, shared: bool) -> Route:
    source, target = sorted((stage, peer_stage))
    return Route((stage == source) == sends, sends, source, target, peer_rank, shared)


@dataclass(frozen=True)
class LinkGroups:
    """Process groups for messages: one per direction, so that activations and gradients do not queue behind each other.

    gloo matches messages by their tags. NCCL has no tags: operations on one communicator run in the order of their
    calls, and a message is matched by that order alone. Two workers agree on it for one pair of stages only, so where
    they exchange the values of several pairs, as under interleaved, each pair has groups of its own.

    NCCL makes the communicator of two workers at their first message, in a call that returns only when the peer makes
    its first call, too. Nothing here puts these first calls into one global order yet.
    """

    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    own: Mapping[tuple[int, int, bool, bool], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def create(
        cls, shape: PipelineShape, new_group: Callable[[Iterable[int] | None], dist.ProcessGroup], *, tags: bool
    ) -> LinkGroups:
        """Create the groups.

        Args:
            shape: of the pipeline.
            new_group: makes a group of these ranks, or of all.
            tags: whether the backend matches messages by their tags.
        """
        own = {}
        # Creating a group is a collective operation of all workers, also of those outside it. So every worker creates
        # every group, in this one order, which follows from the plan.
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
        """Return the group of a route's messages."""
        group = self.own.get((route.source, route.target, route.forward, route.shared))
        return group or (self.activations if route.forward else self.gradients)


@dataclass(frozen=True)
class SendLimits:
    """How many sends on a route may be unfinished before a worker waits for the oldest.

    Args:
        messages: with as many as there can be units in flight, the wait never blocks: the oldest unit has come back.
        rounds: by stage, of gradients of shared weights: rounds that the stage can be ahead of the slowest sharer.
    """

    messages: int
    rounds: Callable[[int], int] = lambda _: 0


@dataclass
class _Posted:
    receive: Receive
    layout: Layout
    buffer: Tensor
    work: dist.Work


class _Inbox:
    """The messages received on one route, in the order of the stream."""

    def __init__(
        self,
        route: Route,
        group: dist.ProcessGroup,
        upcoming: Iterator[Receive],
        layout_of: LayoutOf,
        place: Place,
    ) -> None:
        self._tag = route.tag
        self._group = group
        self._place = place
        self._upcoming = upcoming
        self._layout_of = layout_of
        self._posted: deque[_Posted] = deque()
        # Gradients of shared weights are as large as the weights: a second buffer is not worth its memory.
        self._ahead = 1 if route.shared else POSTED
        for _ in range(self._ahead):
            self._post_next()

    def take(self, receive: Receive) -> dict[str, Tensor]:
        """Wait for `receive` and return its values."""
        if not self._posted:
            self._post(receive)  # the stream was not known in advance
        posted = self._posted.popleft()
        assert posted.receive == receive, (posted.receive, receive)
        # Posting takes time. Before the wait, it is hidden by it; after the wait, it would delay the computation.
        if self._ahead > 1:
            self._post_next()
        _wait(posted.work, receive.peer_rank)
        if self._ahead == 1:
            self._post_next()
        buffer = posted.buffer.to(self._place.compute)
        return unpack(posted.layout, receive.unit, buffer, f"rank {receive.peer_rank}")

    def _post_next(self) -> None:
        receive = next(self._upcoming, None)
        if receive is not None:
            self._post(receive)

    def _post(self, receive: Receive) -> None:
        layout = self._layout_of(receive)
        buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, device=self._place.wire)
        work = dist.irecv(buffer, receive.peer_rank, self._group, tag=self._tag)
        assert work is not None
        self._posted.append(_Posted(receive, layout, buffer, work))


class Links:
    """All messages of this worker.

    Both ends have the messages of one route in the same order. Messages between other stages of the same two workers
    may be in another order at each end; they have another tag, or another group.

    Args:
        groups: process group of each kind of message.
        instructions: returns a new iterator over the worker's stream, from which receives are posted ahead.
        layout_of: buffer layout of a message.
        limits: on unfinished sends.
        place: the device that messages are made on, and the device that computes with their values.
    """

    def __init__(
        self,
        groups: LinkGroups,
        instructions: Callable[[], Iterable[Instruction]],
        layout_of: LayoutOf,
        limits: SendLimits,
        place: Place,
    ) -> None:
        self._limits = limits
        self._place = place
        self._rank = dist.get_rank()
        self._groups = groups
        self._instructions = instructions
        self._layout_of = layout_of
        self._sent: dict[Route, deque[tuple[dist.Work, Tensor]]] = {}
        self._inboxes: dict[Route, _Inbox] = {}
        self._within: dict[Receive, dict[str, Tensor]] = {}  # between two stages of this worker

    def receive(self, receive: Receive) -> dict[str, Tensor]:
        """Wait for the values of `receive` and return them."""
        if receive.peer_rank == self._rank:
            return self._within.pop(receive)
        route = route_of(receive)
        if route not in self._inboxes:
            upcoming = (i for i in self._instructions() if isinstance(i, Receive) and route_of(i) == route)
            self._inboxes[route] = _Inbox(route, self._groups.of(route), upcoming, self._layout_of, self._place)
        return self._inboxes[route].take(receive)

    def send(self, send: Send, values: dict[str, Tensor]) -> None:
        """Start sending `values`, without waiting for the receiver."""
        if send.peer_rank == self._rank:
            # Both stages add the gradients of shared weights in place, so each needs its own.
            own = {n: value.clone() if isinstance(send, SendShared) else value for n, value in values.items()}
            self._within[matching_receive(send, self._rank)] = {n: value.detach() for n, value in own.items()}
            return
        route = route_of(send)
        pending = self._sent.setdefault(route, deque())
        if route.shared:
            # Before the new buffer is made: each is as large as the weights.
            _finish(pending, self._limits.rounds(send.stage), send.peer_rank)
        buffer = pack(self._layout_of(send), send.unit, values, self._place.wire)
        work = dist.isend(buffer, send.peer_rank, self._groups.of(route), tag=route.tag)
        assert work is not None
        # The buffer must live until the transfer ends, and gloo reports the end only to a caller that waits for it.
        pending.append((work, buffer))
        _finish(pending, self._limits.messages, send.peer_rank)

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for route, pending in self._sent.items():
            _finish(pending, 0, route.peer_rank)


def _finish(pending: deque[tuple[dist.Work, Tensor]], keep: int, peer: int) -> None:
    while len(pending) > keep:
        work, _buffer = pending.popleft()
        _wait(work, peer)


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as cause:
        raise ConnectionLostError(
            f"the connection to rank {peer} broke: {first_line(cause)}",
            hint="look for the first worker that failed",
        ) from cause
