"""Point-to-point messages between workers: receives are posted ahead, sends never wait.

Activations and gradients each have a process group of their own, so the two directions of a link never queue behind
each other. Source, order and size of every message follow from the plan: nothing is negotiated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planner.cost import POSTED
from planner.errors import WorkerError
from planner.executor.messages import Layout, pack, unpack
from planner.schedule.instructions import Instruction, Receive, ReceiveActivation, ReceiveGradient, Send, SendActivation

LayoutOf = Callable[[Receive | Send], Layout]


class ConnectionLostError(WorkerError):
    """A peer is gone: the consequence of its failure, not the cause."""


@dataclass
class _Posted:
    receive: Receive
    layout: Layout
    buffer: Tensor
    work: dist.Work


class _Inbox:
    """The messages of one kind from one peer, in the order of the stream."""

    def __init__(
        self, group: dist.ProcessGroup, upcoming: Iterator[Receive], layout_of: LayoutOf, wire: torch.device
    ) -> None:
        self._group = group
        self._wire = wire
        self._upcoming = upcoming
        self._layout_of = layout_of
        self._posted: deque[_Posted] = deque()

    def post(self) -> None:
        """Post the next receive, if the stream has one."""
        receive = next(self._upcoming, None)
        if receive is None:
            return
        layout = self._layout_of(receive)
        buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, device=self._wire)
        work = dist.irecv(buffer, receive.peer_rank, self._group)
        assert work is not None
        self._posted.append(_Posted(receive, layout, buffer, work))

    def take(self, receive: Receive) -> dict[str, Tensor]:
        """Wait for `receive` and return its values."""
        posted = self._posted.popleft()
        assert posted.receive == receive, (posted.receive, receive)
        _wait(posted.work, receive.peer_rank)
        self.post()
        return unpack(posted.layout, receive.unit, posted.buffer, f"rank {receive.peer_rank}")


class Links:
    """All messages of one worker.

    Args:
        activations: process group of the forward direction.
        gradients: process group of the backward direction.
        instructions: makes a copy of the worker's stream, from which the receives to post are taken.
        peers: the kinds of message to expect, and from whom.
        layout_of: buffer layout of a message.
        keep: transfers to one peer that may be unfinished. With as many as there can be units in flight, waiting
            for an older one never blocks: its unit has come back.
        wire: device of the buffers; the CPU for gloo.
    """

    def __init__(
        self,
        activations: dist.ProcessGroup,
        gradients: dist.ProcessGroup,
        instructions: Callable[[], Iterable[Instruction]],
        peers: Iterable[tuple[type[Receive], int]],
        layout_of: LayoutOf,
        keep: int,
        wire: torch.device,
    ) -> None:
        self._keep = keep
        self._wire = wire
        self._activations = activations
        self._gradients = gradients
        self._layout_of = layout_of
        self._sent: dict[tuple[type[Send], int], deque[tuple[dist.Work, Tensor]]] = {}
        self._inboxes: dict[tuple[type[Receive], int], _Inbox] = {}
        for kind, peer in peers:
            upcoming = _receives(instructions(), kind, peer)
            inbox = _Inbox(activations if kind is ReceiveActivation else gradients, upcoming, layout_of, wire)
            self._inboxes[kind, peer] = inbox
            for _ in range(POSTED):
                inbox.post()

    def receive(self, receive: Receive) -> dict[str, Tensor]:
        """The values of `receive`; waits until they are here."""
        return self._inboxes[type(receive), receive.peer_rank].take(receive)

    def send(self, send: Send, values: dict[str, Tensor]) -> None:
        """Start sending `values`; returns at once."""
        buffer = pack(self._layout_of(send), send.unit, values, self._wire)
        group = self._activations if isinstance(send, SendActivation) else self._gradients
        work = dist.isend(buffer, send.peer_rank, group)
        assert work is not None
        # The buffer must live until the transfer ends, which gloo reports only to those who wait for it.
        pending = self._sent.setdefault((type(send), send.peer_rank), deque())
        pending.append((work, buffer))
        _finish(pending, self._keep, send.peer_rank)

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for (_, peer), pending in self._sent.items():
            _finish(pending, 0, peer)


def _finish(pending: deque[tuple[dist.Work, Tensor]], keep: int, peer: int) -> None:
    while len(pending) > keep:
        work, _buffer = pending.popleft()
        _wait(work, peer)


def _receives(instructions: Iterable[Instruction], kind: type[Receive], peer: int) -> Iterator[Receive]:
    for instruction in instructions:
        if isinstance(instruction, (ReceiveActivation, ReceiveGradient)) and (
            isinstance(instruction, kind) and instruction.peer_rank == peer
        ):
            yield instruction


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as cause:
        raise ConnectionLostError(
            f"the connection to rank {peer} broke: {str(cause).splitlines()[0]}",
            hint="look for the first worker that failed",
        ) from cause
