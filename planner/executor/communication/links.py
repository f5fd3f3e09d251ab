"""Point-to-point messages between workers: lanes and their process groups, and gloo's way to post
receives.

Source, order and size of every message follow from the plan: nothing is negotiated. Over gloo
receives are posted ahead: a posted receive costs nothing but its buffer. Over NCCL it is a kernel
on the device: see `nccl_links`.
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import first_line
from planner.executor.communication.later import Reader
from planner.executor.communication.messages import (
    Layout,
    Layouts,
    Outgoing,
    check,
    header_here,
    unpack,
)
from planner.formats.files import replace
from planner.schedule import instructions as do
from planner.schedule.instructions import POSTED, Instruction, Receive, Send
from planner.workers.failures import ConnectionLostError
from planner.workers.groups import DataGroups
from planner.workers.place import Place

Receivers = Callable[[int, Send], Sequence[int]]  # the ranks that take what a rank sends
_RECEIVES = get_args(Receive)  # a tuple: to ask a union takes three times as long


class Lane(NamedTuple):
    """One direction between two stages on two workers; both ends have its messages in the same
    order.
    """

    sender: int  # ranks
    receiver: int
    source: int  # the earlier of the two stages
    target: int
    forward: bool  # from the earlier stage to the later
    shared: bool  # gradients of weights that both stages hold

    @property
    def tag(self) -> int:
        """The tag that tells its messages from those between other stages of the same two
        workers.
        """
        return (self.shared * 10_000 + self.source) * 10_000 + self.target


def lane_of(message: Receive | Send, rank: int) -> Lane:
    """Return the lane that a message of this rank takes."""
    own = (rank, message.stage)
    peer = (message.peer_rank, message.peer_stage)
    (sender, start), (receiver, end) = (own, peer) if isinstance(message, Send) else (peer, own)
    shared = isinstance(message, (do.ReceiveShared, do.SendShared))
    return Lane(sender, receiver, min(start, end), max(start, end), start < end, shared)


def lanes_of(streams: Mapping[int, Iterable[Instruction]]) -> list[Lane]:
    """Return the lanes that the streams of all workers, by rank, send on; in an order that is the
    same everywhere.

    Lanes of disjoint pairs of workers stand side by side (a greedy edge colouring), so that workers
    that go through them together do not wait for each other in one long chain.
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
        turn = next(
            number for number in count() if number not in taken[lane.sender] | taken[lane.receiver]
        )
        turns[lane] = turn
        taken[lane.sender].add(turn)
        taken[lane.receiver].add(turn)

    return sorted(found, key=lambda lane: (turns[lane], lane))


class LinkGroups:
    """Process groups for messages; all workers make them together.

    gloo matches messages by their tags, so one group of all workers per direction will do. Over
    NCCL operations on one communicator match by the order of their calls alone. So each lane has a
    group of its own.

    Args:
        streams: of all workers by rank, long enough that every pair that ever exchanges messages
            does.
        receivers: of each message; None where that is who it names.
        made: training's groups, whose lanes are used again over NCCL.
    """

    def __init__(
        self,
        groups: DataGroups,
        streams: Mapping[int, Iterable[Instruction]],
        receivers: Receivers | None = None,
        made: "LinkGroups | None" = None,
    ) -> None:
        self._receivers = receivers
        self._by_direction: dict[bool, dist.ProcessGroup] = {}
        self._by_lane: dict[Lane, dist.ProcessGroup] = {}
        if groups.tagged:
            self._by_direction = {
                forward: groups.for_collectives(None) for forward in (True, False)
            }
        else:
            # Making a group is a call of all workers, and NCCL connects a lane at its first use:
            # one order for all.
            lanes = lanes_of({rank: self.copied(stream, rank) for rank, stream in streams.items()})
            known = {} if made is None else made._by_lane
            self._by_lane = {
                lane: known.get(lane) or groups.for_messages(lane.sender, lane.receiver)
                for lane in lanes
            }

    def copied(self, stream: Iterable[Instruction], rank: int) -> Iterator[Instruction]:
        """Yield a worker's stream with a send for each receiver, without those to itself."""
        for each in stream:
            yield from self.copies(each, rank) if isinstance(each, Send) else (each,)

    def copies(self, send: Send, rank: int) -> Sequence[Send]:
        """Return what a worker sends to other workers in place of `send`: nothing, or one or
        several messages.
        """
        if send.peer_rank == rank:
            return ()
        if self._receivers is None:
            return (send,)
        return [replace(send, peer_rank=each) for each in self._receivers(rank, send)]

    def towards(self, rank: int) -> list[Lane]:
        """Return the lanes of a worker's receives that have a group of their own."""
        return [lane for lane in self._by_lane if lane.receiver == rank]

    def of(self, lane: Lane) -> dist.ProcessGroup:
        """Return the process group of a lane."""
        return self._by_direction.get(lane.forward) or self._by_lane[lane]


class End:
    """This worker's end of a lane: what is looked up once, for all its messages, and the messages
    under way.
    """

    __slots__ = ("_place", "group", "lane", "left", "passed", "peer", "posted", "sent", "tag")

    def __init__(self, lane: Lane, group: dist.ProcessGroup, rank: int) -> None:
        self.lane = lane
        self.group = group
        self.tag = lane.tag
        if rank == lane.receiver:
            self.peer = lane.sender
        else:
            self.peer = lane.receiver

        self._place = dist.get_group_rank(group, self.peer)
        self.sent: deque[tuple[dist.Work, Outgoing]] = deque()
        self.begin()

    def begin(self) -> None:
        """Forget what is known of the stream."""
        self.left: Outgoing | None = None  # the newest that has left, to be filled again
        self.passed: deque[Receive] = deque()  # by the look-ahead of another lane
        self.posted: deque[Posted] = deque()

    # `isend` and `irecv` of torch.distributed look up and check for each message what does not
    # change.

    def send(self, message: Tensor) -> dist.Work:
        """Begin to send a message."""
        return self.group.send([message], self._place, self.tag)

    def receive(self, message: Tensor) -> dist.Work:
        """Begin to receive a message."""
        return self.group.recv([message], self._place, self.tag)


LayoutOf = Callable[[Receive | Send], Layout]


class Ahead(Iterator[Instruction]):
    """A worker's stream, made once for who executes it and for its links, which look ahead
    in it.
    """

    def __init__(self, instructions: Iterable[Instruction] = ()) -> None:
        self._rest = iter(instructions)
        self._seen = deque[Instruction]()

    def __next__(self) -> Instruction:
        if self._seen:
            return self._seen.popleft()
        return next(self._rest)

    def look(self) -> Instruction | None:
        """Return the next instruction that was neither executed nor seen; None at the end."""
        found = next(self._rest, None)
        if found is not None:
            self._seen.append(found)
        return found


@dataclass(slots=True)
class Posted:
    """A receive that has been posted, and the buffer that its message fills."""

    receive: Receive
    layout: Layout
    buffer: Tensor
    work: dist.Work

    def wait(self) -> None:
        """Wait until the message is there; raise an error that names its sender where it cannot
        come.
        """
        wait_for(self.work, self.receive.peer_rank)

    def later_check(self) -> Reader:
        """Return what checks a copy of the header; it holds no buffer, whose memory may be needed
        before.
        """
        layout = self.layout
        unit = self.receive.unit
        sender = self.receive.peer_rank
        return lambda word: check(layout, unit, int(word), sender)


class Links(ABC):
    """All messages of this worker.

    Args:
        most: sends on a lane that may be unfinished at once. With as many as there can be units in
            flight, the wait for the oldest never blocks.
        place: the device that messages are made on, and the device that computes with their values.
        rounds: as `most`, of gradients of shared weights, by stage: rounds that it can be ahead of
            the slowest sharer.
    """

    _rounds_more = 0  # sends of shared gradients that may be unfinished beyond the limit

    def __init__(
        self,
        groups: LinkGroups,
        layout_of: LayoutOf,
        most: int,
        place: Place,
        rounds: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._groups = groups
        self._layout_of = layout_of
        self._place = place
        self._most = most
        self._rounds = rounds
        self._rank = dist.get_rank()
        self._ends: dict[tuple[type, int, int, int], End] = {}
        self._within: dict[Receive, dict[str, Tensor]] = {}  # between two stages of this worker
        self.follow(Ahead())

    def receive(self, receive: Receive) -> dict[str, Tensor]:
        """Return the values of `receive`; raise WorkerError when another came, on a GPU in one of
        the next calls.
        """
        if receive.peer_rank == self._rank:
            return self._within.pop(receive)
        posted = self._take(receive, self._end(receive))
        compute = self._place.compute
        return unpack(
            posted.layout,
            posted.buffer if compute == self._place.wire else posted.buffer.to(compute),
        )

    def send(self, send: Send, values: dict[str, Tensor]) -> None:
        """Start sending `values`, without waiting for the receiver."""
        if send.peer_rank == self._rank:
            # Both stages add the gradients of shared weights in place, so each needs its own.
            own = {
                n: value.clone() if isinstance(send, do.SendShared) else value
                for n, value in values.items()
            }
            self._within[do.matching_receive(send, self._rank)] = {
                n: value.detach() for n, value in own.items()
            }
            return

        sends = self._groups.copies(send, self._rank)
        ends = list(map(self._end, sends))
        # before messages are packed, so that these take the memory of some that have left
        for end in ends:
            self._finish(
                end,
                self._rounds(send.stage) + self._rounds_more if end.lane.shared else self._most - 1,
            )

        self._start(sends, [(end, self._packed(send, end, values)) for end in ends])

    def drain(self) -> None:
        """Wait until all messages are sent."""
        for end in self._ends.values():
            self._finish(end, 0)
        self.settle()

    def expect(self, under_way: Callable[[], Iterable[Receive]]) -> None:
        """Post the receives of messages that are sent before the worker goes on, where a send waits
        for its receive.
        """
        return  # over gloo a send holds up nothing but itself

    def settle(self) -> None:
        """Wait for the checks of all messages received so far; nothing may be on its way to this
        worker.
        """
        return  # over gloo each message is checked as it is taken

    def reserve(self, layouts: Layouts, samples: int) -> None:
        """Take memory for messages of microbatches of so many samples, before the first of them."""
        return  # on a CPU taking it holds up nobody

    def follow(self, stream: Ahead) -> None:
        """Prepare to post the messages of another stream, which the worker executes; nothing may be
        on its way.

        A stream without instructions is of one that is not known in advance.
        """
        self._stream = stream
        for end in self._ends.values():
            end.begin()

    @abstractmethod
    def _take(self, receive: Receive, end: End) -> Posted: ...

    @abstractmethod
    def _start(self, sends: Sequence[Send], messages: Sequence[tuple[End, Outgoing]]) -> None: ...

    def _end(self, message: Receive | Send) -> End:
        key = type(message), message.stage, message.peer_stage, message.peer_rank
        found = self._ends.get(key)
        if found is None:
            lane = lane_of(message, self._rank)
            found = self._ends[key] = End(lane, self._groups.of(lane), self._rank)
        return found

    def _packed(self, send: Send, end: End, values: dict[str, Tensor]) -> Outgoing:
        layout = self._layout_of(send)
        message = end.left
        if message is None or message.layout is not layout:
            message = Outgoing(
                layout, self._place.wire, None if message is None else message.memory
            )

        end.left = None
        message.fill(send.unit, values)
        return message

    def _post_send(self, end: End, message: Outgoing) -> None:
        # The buffer must live until the transfer ends, and gloo reports the end only to a caller
        # that waits for it.
        end.sent.append((end.send(message.buffer), message))

    def _finish(self, end: End, keep: int) -> None:
        while len(end.sent) > keep:
            work, message = end.sent.popleft()
            # Over NCCL the stream waits, not the host: what fills the buffer next does so after the
            # transfer has ended.
            wait_for(work, end.peer)
            if not end.lane.shared:  # those are as large as the weights, and not worth their memory
                end.left = message


def wait_for(work: dist.Work, peer: int) -> None:
    """Wait for `work`: gloo lets the host wait, NCCL the current stream; raise ConnectionLostError
    where it broke.
    """
    try:
        work.wait()
    except RuntimeError as cause:
        raise ConnectionLostError(
            f"the connection to rank {peer} broke: {first_line(cause)}",
            hint="look for the first worker that failed",
        ) from cause


class GlooLinks(Links):
    """Posts `POSTED` receives per lane ahead, of the worker's stream as far as it is known."""

    def _take(self, receive: Receive, end: End) -> Posted:
        # Gradients of shared weights are as large as the weights: a second buffer is not worth its
        # memory.
        ahead = 1 if end.lane.shared else POSTED
        if end.posted:
            posted = end.posted.popleft()
        else:
            posted = self._post(end.passed.popleft() if end.passed else receive, end)

        assert posted.receive == receive, (posted.receive, receive)
        # Posting takes time. Before the wait, it is hidden by it; after the wait, it would delay
        # the computation.
        if ahead > 1:
            self._post_ahead(end, ahead)
        posted.wait()
        if ahead == 1:
            self._post_ahead(end, ahead)
        check(posted.layout, receive.unit, header_here(posted.buffer), receive.peer_rank)
        return posted

    def _start(self, sends: Sequence[Send], messages: Sequence[tuple[End, Outgoing]]) -> None:
        for end, message in messages:
            self._post_send(end, message)

    def _post_ahead(self, end: End, ahead: int) -> None:
        while len(end.posted) < ahead:
            while not end.passed:
                each = self._stream.look()
                if each is None:
                    return
                if isinstance(each, _RECEIVES) and each.peer_rank != self._rank:
                    self._end(each).passed.append(each)
            end.posted.append(self._post(end.passed.popleft(), end))

    def _post(self, receive: Receive, end: End) -> Posted:
        layout = self._layout_of(receive)
        buffer = layout.part_of(
            torch.empty(layout.room_bytes, dtype=torch.uint8, device=self._place.wire)
        )
        return Posted(receive, layout, buffer, end.receive(buffer))
