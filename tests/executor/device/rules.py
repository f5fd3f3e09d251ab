"""The rules by which host operations of several workers with NCCL wait for each other, and a search
for a circle.

An operation ends when certain others have ended or begun; which ones does not depend on time. So
every way in which the workers can run together comes to the same end, and they deadlock exactly if
these conditions close a circle.

    first use       the first operation on a communicator holds the host until all members make
                    theirs
    kernels         an operation begins after the one before it on its communicator, and after what
                    its device had to compute when it was posted, or when its buffer was allocated;
                    a receive ends after its send has begun, an all-reduce after all have
    sends           buffered: end by themselves; rendezvous: end after their receive has begun
    stream wait     computation goes on after the operation has ended; the host does not wait
    host wait       the host goes on after its device has computed what it was given so far
    device wait     the host goes on after everything that was posted on its device has ended
    meeting         the hosts go on when all members have come (gloo: barriers, all-reduces, new
                    groups)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import assert_never


@dataclass(frozen=True)
class Post:
    """Post operation `number` on a communicator: the members' operations of one number belong
    together.

    It begins when the device has done its first `computed` stream waits.
    """

    communicator: str
    number: int
    kind: Literal["send", "receive", "all"]
    computed: int


@dataclass(frozen=True)
class StreamWait:
    """Let the device's computation wait for a posted operation."""

    post: Post


@dataclass(frozen=True)
class HostWait:
    """Let the host wait until the device has done its first `computed` stream waits, and what was
    between them.
    """

    computed: int
    # whether it looks at memory of the device: it waits even where nothing is left to wait for
    read: bool = False


@dataclass(frozen=True)
class DeviceWait:
    """Let the host wait for the whole device."""


@dataclass(frozen=True)
class Work:
    """Allocate or launch something: the allocator or the loader of kernels may wait for the whole
    device here.

    It does so only where it `takes` memory that it does not have: all kernels are loaded at the
    start.
    """

    takes: bool = False


@dataclass(frozen=True)
class Meeting:
    """Wait for all members on the host."""

    name: str


@dataclass(frozen=True)
class Tell:
    """Send on the host; does not wait."""

    name: str


@dataclass(frozen=True)
class Hear:
    """Wait for a `Tell` of this name on the host."""

    name: str


Operation = Post | StreamWait | HostWait | DeviceWait | Work | Meeting | Tell | Hear
Recording = Mapping[int, Sequence[Operation]]  # by rank, in the order of the host's calls
_Node = tuple[str, int, object]  # what happens, on which rank, and which


class NCCLDeadlock(AssertionError):  # noqa: N818 - a finding, and no fault of this module
    """Workers that wait for each other for ever."""


def check(
    recording: Recording,
    *,
    waiting: Collection[int] = (),
    rendezvous: bool = False,
    one_queue: bool = False,
    taking: bool = False,
) -> None:
    """Check that the workers come to their ends.

    Args:
        recording: what each worker's host does.
        waiting: ranks on which every allocation and every launch waits for the whole device.
            Conditions only add up, so no choice of fewer waits closes a circle that all of them
            together do not.
        rendezvous: a send ends only after its receive has begun.
        one_queue: all streams of a device share one hardware queue, as with
            CUDA_DEVICE_MAX_CONNECTIONS=1: nothing begins before everything that was launched
            earlier has begun.
        taking: those in `waiting` wait only where the allocator takes memory that it does not have.

    Raises:
        NCCLDeadlock: naming what a circle consists of, or an operation without a counterpart.
    """
    _Conditions(recording, frozenset(waiting), rendezvous, one_queue, taking).check()


class _Conditions:
    def __init__(
        self,
        recording: Recording,
        waiting: frozenset[int],
        rendezvous: bool,
        one_queue: bool,
        taking: bool,
    ) -> None:
        self.waiting, self.rendezvous, self.one_queue, self.taking = (
            waiting,
            rendezvous,
            one_queue,
            taking,
        )
        self.after: dict[_Node, list[_Node]] = {}  # what must have happened before
        self.members: dict[tuple[str, int], list[tuple[int, Post]]] = {}
        self.meetings: dict[str, list[_Node]] = {}
        for rank, operations in recording.items():
            for index, operation in enumerate(operations):
                if isinstance(operation, Post):
                    self.members.setdefault((operation.communicator, operation.number), []).append(
                        (rank, operation)
                    )
                elif isinstance(operation, (Meeting, Tell)):
                    self.meetings.setdefault(operation.name, []).append(("host", rank, index - 1))
        for rank, operations in recording.items():
            self._worker(rank, operations)

    def _worker(self, rank: int, operations: Sequence[Operation]) -> None:
        computed = 0
        posted: dict[str, Post] = {}  # newest, by communicator
        launched: _Node | None = None
        self.after["host", rank, -1] = []
        self.after["compute", rank, 0] = []
        for index, operation in enumerate(operations):
            here: _Node = ("host", rank, index - 1)
            conditions = [here]
            match operation:
                case Post(communicator, number):
                    begun: _Node = ("begin", rank, operation)
                    before = [here, ("compute", rank, operation.computed)]
                    if communicator in posted:
                        before.append(("end", rank, posted[communicator]))
                    if self.one_queue and launched is not None:
                        before.append(launched)
                    self.after[begun] = before
                    self.after["end", rank, operation] = [begun, *self._partners(rank, operation)]
                    posted[communicator] = operation
                    launched = begun
                    if number == 0:
                        conditions += [
                            ("come", other, post) for other, post in self.members[communicator, 0]
                        ]
                    self.after["come", rank, operation] = [here]
                case StreamWait(post):
                    computed += 1
                    before = [here, ("compute", rank, computed - 1), ("end", rank, post)]
                    if self.one_queue and launched is not None:
                        before.append(launched)
                    self.after["compute", rank, computed] = before
                case HostWait(waited):
                    conditions.append(("compute", rank, waited))
                case Meeting(name):
                    conditions += self.meetings[name]
                case Hear(name):
                    conditions += self.meetings.get(name, [("told", rank, name)])
                case Tell():
                    pass
                case Work(takes):
                    if rank in self.waiting and (takes or not self.taking):
                        conditions += self._all_of(rank, computed, posted)
                case DeviceWait():
                    conditions += self._all_of(rank, computed, posted)
                case _:
                    assert_never(operation)
            self.after["host", rank, index] = conditions

    def _all_of(self, rank: int, computed: int, posted: Mapping[str, Post]) -> list[_Node]:
        return [("compute", rank, computed), *(("end", rank, post) for post in posted.values())]

    def _partners(self, rank: int, post: Post) -> list[_Node]:
        """Return what must have happened on other devices for an operation to end."""
        others = [
            (other, each)
            for other, each in self.members[post.communicator, post.number]
            if other != rank
        ]
        begun: list[_Node] = [("begin", other, each) for other, each in others]
        match post.kind:
            case "send":
                return (
                    self._counterpart(post, "receive", others) or begun if self.rendezvous else []
                )
            case "receive":
                return self._counterpart(post, "send", others) or begun
            case "all":
                return begun

    def _counterpart(self, post: Post, kind: str, others: list[tuple[int, Post]]) -> list[_Node]:
        if [each.kind for _, each in others] != [kind]:
            raise NCCLDeadlock(f"{post} has no counterpart: {others}")
        return []

    def check(self) -> None:
        """Take away what can happen until nothing is left."""
        open_ = {node: len(conditions) for node, conditions in self.after.items()}
        waiting_for: dict[_Node, list[_Node]] = {}
        for node, conditions in self.after.items():
            for each in conditions:
                waiting_for.setdefault(each, []).append(node)
        ready = [node for node, count in open_.items() if not count]
        while ready:
            for node in waiting_for.get(ready.pop(), ()):
                open_[node] -= 1
                if not open_[node]:
                    ready.append(node)
        stuck = {node for node, count in open_.items() if count}
        if stuck:
            raise NCCLDeadlock(" <- ".join(map(str, self._circle(stuck))))

    def _circle(self, stuck: set[_Node]) -> Iterable[_Node]:
        """Follow what is waited for until something comes again."""
        path: list[_Node] = [
            min((node for node in stuck if node[0] == "host"), key=lambda node: str(node))
        ]
        while True:
            nexts = [
                each
                for each in self.after.get(path[-1], ())
                if each in stuck or each not in self.after
            ]
            if not nexts or nexts[0] not in stuck:
                return [*path, *nexts[:1]]
            if nexts[-1] in path:
                return path[path.index(nexts[-1]) :]
            path.append(nexts[-1])
