"""Messages over NCCL: receives are posted when they are taken, together with the sends right before
them.

A posted receive is a kernel that stays on the device until its message comes, and so is a large
send until its receiver posts. Whatever waits for the whole device waits for them: the allocator
where memory is short, a kernel that is loaded at its first use. The host that waits posts nothing
that its peers wait for, and two such workers wait for each other.

So consecutive messages of a worker's stream are a *run*: first sends, then receives. All memory of
a run is allocated before any of it is posted, and then it is posted without a pause. A wait between
two runs therefore never has a send behind it whose peer waits for the receive after it. A buffer is
allocated one message ahead, and its transfer waits for what the device had to do until then, not
for the computation in between. Headers are checked by event.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.executor.communication.later import Later
from planner.executor.communication.links import (
    Ahead,
    End,
    GlooLinks,
    LayoutOf,
    LinkGroups,
    Links,
    Posted,
)
from planner.executor.communication.messages import Layouts, Outgoing, header
from planner.runtime import Event, runtime_of
from planner.schedule.instructions import LEAD, Message, Receive, Send
from planner.workers.groups import GLOO
from planner.workers.place import Place


@dataclass(frozen=True)
class _Buffer:
    memory: Tensor
    # when the device has come to where the memory was allocated; None: it is
    free: Event | None = None


class NCCLLinks(Links):
    """Posts each run of consecutive messages as a whole.

    Where the stream is not known in advance, each message is a run of its own.
    """

    # Over gloo the receiver has one more buffer, which is posted ahead. Here the sender has it.
    # Otherwise its computation would wait for a receive that may come after an evaluation, which in
    # turn waits for that computation.
    _rounds_more = 1

    def __init__(
        self, groups: LinkGroups, layout_of: LayoutOf, most: int, place: Place, *more: Any
    ) -> None:
        # What a message takes beside its buffers is taken once: one stream, and pinned memory.
        self._runtime = runtime_of(place.wire)
        self._side = self._runtime.stream(place.wire)
        self._later = Later(place.wire, LEAD)
        super().__init__(groups, layout_of, most, place, *more)

    def reserve(self, layouts: Layouts, samples: int) -> None:
        """See base class."""
        # The first message of each lane comes into memory of the side stream; all others into that
        # of computation.
        size_bytes = sum(
            layouts.received_bytes(
                lane.source, lane.target, forward=lane.forward, shared=lane.shared, samples=samples
            )
            for lane in self._groups.towards(self._rank)
        )
        with self._runtime.on(self._side):
            self._runtime.reserve(self._place.wire, size_bytes)

    def follow(self, stream: Ahead) -> None:
        """See base class."""
        super().follow(stream)
        self._run: deque[Message] = deque()  # what is left of the present one
        self._waiting: list[tuple[End, Outgoing]] = []  # its sends so far
        self._posted: deque[Posted] = deque()  # its receives
        self._early: dict[Receive, Posted] = {}  # posted before a pause
        self._spare: dict[End, _Buffer] = {}

    def expect(self, under_way: Callable[[], Iterable[Receive]]) -> None:
        """See base class."""
        receives = [receive for receive in under_way() if receive not in self._early]
        prepared = [self._prepared(receive) for receive in receives]
        for receive, (buffer, spare) in zip(receives, prepared, strict=True):
            self._early[receive] = self._post_into(receive, buffer, spare)

    def settle(self) -> None:
        self._later.flush()

    def _start(self, sends: Sequence[Send], messages: Sequence[tuple[End, Outgoing]]) -> None:
        if not sends:
            return
        self._reach(sends)
        # Packed before, because that may allocate memory; posted with the last send of the run, and
        # the receives after it.
        self._waiting += messages
        if not (self._run and isinstance(self._run[0], Send)):
            self._post()

    def _take(self, receive: Receive, end: End) -> Posted:
        self._reach([receive])
        posted = self._early.pop(receive, None)
        if posted is None:
            if not self._posted:
                self._post(receive)
            posted = self._posted.popleft()

        assert posted.receive == receive, (posted.receive, receive)
        posted.wait()
        self._later.read(header(posted.buffer), posted.later_check())
        return posted

    def _reach(self, messages: Sequence[Message]) -> None:
        # Messages on a communicator match by the order of the calls alone, so a worker may not
        # leave its stream.
        if not self._run:
            self._run = self._run_from(messages)
        for message in messages:
            expected = self._run.popleft()
            assert expected == message, (expected, message)

    def _run_from(self, messages: Sequence[Message]) -> deque[Message]:
        run = deque(messages)
        while isinstance(each := self._stream.look(), Message):
            # Messages between two stages of one worker travel nowhere, and are left out.
            more = self._groups.copies(each, self._rank) if isinstance(each, Send) else [each]
            # A send may need what the receive before it brings, so it cannot be posted together
            # with it.
            if more and isinstance(each, Send) and isinstance(run[-1], Receive):
                break
            run += (message for message in more if message.peer_rank != self._rank)

        return run

    def _post(self, first: Receive | None = None) -> None:
        """Post the sends of the run, and its receives: `first` and those that follow."""
        receives = [
            each
            for each in (first, *self._run)
            if isinstance(each, Receive) and each not in self._early
        ]
        prepared = [self._prepared(receive) for receive in receives]
        # From here to the last call nothing may be allocated: the allocator may wait for the whole
        # device, and so for a send just posted, whose receiver waits for what this run has yet to
        # post.
        for end, message in self._waiting:
            self._post_send(end, message)
        self._waiting.clear()
        for receive, (buffer, spare) in zip(receives, prepared, strict=True):
            self._posted.append(self._post_into(receive, buffer, spare))

    def _post_into(self, receive: Receive, buffer: _Buffer, spare: _Buffer | None) -> Posted:
        end = self._end(receive)
        if spare is not None:
            self._spare[end] = spare
        layout = self._layout_of(receive)
        message = layout.part_of(buffer.memory)
        with self._on_side_stream(buffer):
            return Posted(receive, layout, message, end.receive(message))

    def _prepared(self, receive: Receive) -> tuple[_Buffer, _Buffer | None]:
        # The buffer for a message, and one for the next of its lane.
        end = self._end(receive)
        size = self._layout_of(receive).room_bytes
        kept = self._spare.pop(end, None)
        if kept is not None and len(kept.memory) == size:
            buffer = kept
        else:
            buffer = self._fresh(size)

        # Gradients of shared weights are as large as the weights: a second buffer is not worth its
        # memory.
        return buffer, None if end.lane.shared else self._allocated(size)

    def _allocated(self, size_bytes: int) -> _Buffer:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._place.wire)
        # The device may still work with what was in this memory, until it comes here.
        return _Buffer(memory, self._runtime.current_stream(memory.device).record_event())

    def _fresh(self, size_bytes: int) -> _Buffer:
        # Memory of the side stream, which nothing else has used: no computation needs to be waited
        # for.
        with self._runtime.on(self._side):
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._place.wire)
        # Freed, it goes back to the side stream, but not before the computation with it has ended.
        self._runtime.keep(memory, self._runtime.current_stream(memory.device))
        return _Buffer(memory, None)

    def _on_side_stream(self, buffer: _Buffer) -> AbstractContextManager[object]:
        # An operation waits for all that its stream was given. On a stream of its own that is this
        # event alone.
        if buffer.free is not None:
            self._side.wait_event(buffer.free)
        return self._runtime.on(self._side)


def links_over(place: Place) -> type[Links]:
    """Return the links for the backend that sends from `place`: what a posted receive is there
    decides.
    """
    if place.backend == GLOO:
        return GlooLinks
    return NCCLLinks
