"""Devices that work beside their hosts: streams, events and memory, with operations in any order
that these allow.

Every operation of PyTorch on a worker is carried out twice. First at once, in the order of the
host's calls: that gives the shapes, and the values as they would be if every operation waited for
all before it. Then once more, on other memory, when the simulated device comes to it: that may be
much later, before or after what is on other streams. What the host reads of a device, and what a
run leaves there, must be the same to the bit. Otherwise a wait is missing.

    streams     operations begin in the order of their stream; among several streams a seed decides,
                which keeps one waiting for as long as another can go on
    events      a mark in a stream; another stream, or the host, waits until the device has passed
                it
    memory      a tensor's block goes back to the stream that it was allocated on when the tensor is
                dropped, at once, and may be given out again there: work on that stream comes later
                in any case. A block that `keep` names other streams for waits until these have
                passed what they had by then. Freed memory is overwritten.
    messages    each communicator has a stream of its own. A receive spoils its buffer when it
                begins. A send ends when its receive takes it, or, where sends are buffered, before:
                NCCL buffers a few megabytes
    host        reads of a device's memory wait for the current stream; pinned memory must have been
                written
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from planner.runtime import Runtime
from tests.executor.device.rules import DeviceWait, HostWait, Work

if TYPE_CHECKING:
    from tests.executor.device.world import World

_SPOILED = 0xA5  # bytes of memory that nothing has been written to
_SMALL_BYTES = 1 << 18  # that a reservation takes beside what it is asked for, for small tensors
# sizes of blocks are rounded up to it, so that tensors of about one size share blocks
_ROUND_BYTES = 512
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class RaceError(AssertionError):
    """What the device has is not what it would have if every operation waited for all before it."""


@dataclass(eq=False)
class Mark:
    """A place in a stream."""

    computed: int  # stream waits before it
    passed: bool = False


@dataclass(eq=False)
class Block:
    """Memory of a device, or pinned memory of its host."""

    memory: Tensor
    stream: SimulatedStream
    pinned: bool = False
    waiting: int = 0  # operations with it that the device has not done
    used_on: set[SimulatedStream] = field(default_factory=set)  # beside its own stream

    def spoil(self) -> None:
        self.memory.fill_(_SPOILED)


@dataclass(frozen=True)
class View:
    """A tensor in a block."""

    block: Block
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(self.block.memory.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(eq=False)
class Message:
    """A worker's part of an operation on a communicator."""

    key: tuple[str, int]  # communicator and number
    kind: str  # "send", "receive" or "all"
    members: int
    given: View | None
    taken: View | None
    combine: Callable[[list[Tensor]], Tensor] | None
    rank: int
    ended: Mark
    begun: bool = False
    left: Tensor | None = None  # a copy of what was given, on its way


Item = Callable[[], object] | Mark | Message | tuple[Mark]  # the last one waits for it


class SimulatedStream:
    """A queue of operations of one device."""

    def __init__(self, device: Devices, rank: int, first: int) -> None:
        self._device, self.rank, self.number = device, rank, device.streams
        self.items: deque[Item] = deque()
        self.computed = 0  # stream waits so far, its own and those of events that it waits for
        self._first = first
        self.draw()

    def draw(self) -> None:
        """Draw a priority."""
        self.priority = self._first + self._device.order.random()

    def mark(self) -> Mark:
        mark = Mark(self.computed)
        self.items.append(mark)
        return mark

    def wait_for(self, mark: Mark) -> None:
        if not mark.passed:
            self.items.append((mark,))

    # What the product calls.

    def wait_event(self, event: SimulatedEvent) -> None:
        if event.mark is not None:
            self.computed = max(self.computed, event.mark.computed)
            self.wait_for(event.mark)

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self._device)
        event.mark = self.mark()
        return event

    def synchronize(self) -> None:
        self._device.host_waits(self.mark())


class SimulatedEvent:
    """An event of the current stream."""

    def __init__(self, device: Devices) -> None:
        self._device = device
        self.mark: Mark | None = None

    def record(self) -> None:
        self.mark = self._device.current().mark()

    def query(self) -> bool:
        self._device.go_on()
        return self.mark is None or self.mark.passed

    def synchronize(self) -> None:
        if self.mark is not None:
            self._device.host_waits(self.mark)

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        assert self.mark is not None
        assert end_event.mark is not None
        assert self.mark.passed
        assert end_event.mark.passed, (
            "an event is asked for its time before the device has passed it"
        )
        return 1.0


class Devices:
    """The devices of all workers of a world.

    Args:
        seed: of the order, and of how far the device keeps up with its host; None for one that does
            nothing before its host waits for it. Messages come first where it is 1 more than a
            multiple of 3, and last where it is 2 more.
        buffered: whether a send may end before its receive begins.

    Attributes:
        RECORDS: whether a freed block waits for the messages that it was in, as PyTorch lets it;
            races show earlier where it does not.
    """

    RECORDS = False

    def __init__(self, world: World, seed: int | None, *, buffered: bool = False) -> None:
        self._world = world
        self.order = random.Random(seed or 0)
        # The chance that a device goes on, per call of its host.
        self._keeps_up = 0.0 if seed is None else (0.0, 0.02, 0.3)[seed % 4 % 3]
        self._messages_first = 0 if seed is None else (0, 1, -1)[seed % 3]
        self._buffered = buffered
        self._blocks: dict[int, Block] = {}  # by storage
        self._of_host: set[int] = set()  # storages
        self._pools: defaultdict[tuple[SimulatedStream, int], list[Block]] = defaultdict(list)
        self._limbo: list[tuple[Block, list[Mark]]] = []
        self._compute: dict[int, SimulatedStream] = {}
        self._streams: defaultdict[int, list[SimulatedStream]] = defaultdict(list)
        self._of_communicator: dict[tuple[int, str], SimulatedStream] = {}
        self._current: dict[int, SimulatedStream] = {}
        self._messages: defaultdict[tuple[str, int], dict[int, Message]] = defaultdict(dict)
        # bytes that were reserved and are left
        self._spared: defaultdict[SimulatedStream, int] = defaultdict(int)
        self._pinned: defaultdict[int, list[Block]] = defaultdict(list)  # free, by rank
        self.made_blocks: defaultdict[int, int] = defaultdict(int)  # by rank
        self.streams = 0  # made so far
        self._newest: SimulatedStream | None = None  # that did something
        self.history: list[int] = []  # by operation, the stream that it was on
        # of messages, that the host has read, by rank
        self.headers: defaultdict[int, int] = defaultdict(int)

    # Streams.

    def new_stream(self, rank: int, first: int = 0) -> SimulatedStream:
        stream = SimulatedStream(self, rank, first)
        self.streams += 1
        self._streams[rank].append(stream)
        return stream

    def current(self) -> SimulatedStream:
        rank = self._world.rank
        return self._current.get(rank) or self._compute_of(rank)

    def _compute_of(self, rank: int) -> SimulatedStream:
        if rank not in self._compute:
            self._compute[rank] = self.new_stream(rank)
        return self._compute[rank]

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        rank = self._world.rank
        before = self._current.get(rank)
        self._current[rank] = stream
        try:
            yield
        finally:
            if before is None:
                del self._current[rank]
            else:
                self._current[rank] = before

    # Memory.

    def adopt(self, tensor: Tensor) -> Block:
        """Return the block of a tensor; one that came from elsewhere is on the device with the
        values that it has.
        """
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            self._of_host.discard(storage._cdata)
            block = self._made(_size_of(storage), self._compute_of(self._world.rank))
            with _plain():
                block.memory[: storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._give_to(storage, block)
        return block

    def view(self, tensor: Tensor) -> View:
        assert tensor.layout == torch.strided, f"the simulated device has no {tensor.layout}"
        offset = int(tensor.storage_offset())
        return View(self.adopt(tensor), tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    def new(self, tensor: Tensor) -> View:
        """Allocate a block for a tensor that an operation made, on the current stream."""
        self._allocate(tensor.untyped_storage())
        return self.view(tensor)

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._blocks

    def note_of_host(self, tensor: Tensor) -> None:
        """Take a tensor for one of the host's: made from Python's numbers, or computed from such
        tensors alone.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks and storage._cdata not in self._of_host:
            self._of_host.add(storage._cdata)
            weakref.finalize(storage, self._of_host.discard, storage._cdata)

    def is_of_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._of_host

    def sent_along(self, tensor: Tensor) -> View:
        """Return a copy of a tensor of the host, as an operation takes it with it."""
        with _plain():
            kept = tensor.detach().clone()
        block = Block(
            torch.empty(0, dtype=torch.uint8).set_(kept.untyped_storage()), self.current()
        )
        return View(block, kept.dtype, 0, tuple(kept.shape), kept.stride())

    def pin(self, tensor: Tensor) -> None:
        """Move a tensor of the host to pinned memory; what was freed is used again when no copy of
        it is under way.
        """
        storage, free = tensor.untyped_storage(), self._pinned[self._world.rank]
        size = _size_of(storage)
        block = next(
            (each for each in free if each.memory.numel() == size and not each.waiting), None
        )
        if block is None:
            self._world.note(Work(takes=True))
            with _plain():
                memory = torch.empty(size, dtype=torch.uint8)
            block = Block(memory, self._compute_of(self._world.rank), pinned=True)
        else:
            free.remove(block)
        with _plain():
            block.memory[: storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._give_to(storage, block)

    def reserve(self, size_bytes: int) -> None:
        """Take memory that the current stream may use."""
        self._spared[self.current()] += size_bytes + _SMALL_BYTES

    def allocated_bytes(self) -> int:
        """Return what this worker's tensors take."""
        rank = self._world.rank
        blocks = {
            id(block): block
            for block in self._blocks.values()
            if block.stream.rank == rank and not block.pinned
        }
        return sum(block.memory.numel() for block in blocks.values())

    def to_host(self, tensor: Tensor) -> None:
        """Take a tensor for the host's memory, as gloo does: what was computed there has been
        computed.
        """
        block = self._blocks.pop(tensor.untyped_storage()._cdata, None)
        with _plain():
            while block is not None and block.waiting and self._step():
                pass

    def keep(self, tensor: Tensor, stream: SimulatedStream) -> None:
        self.adopt(tensor).used_on.add(stream)

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        """Give a tensor that an operation makes a block of the current stream."""
        stream, size = self.current(), _size_of(storage)
        for freed in [each for each in self._limbo if all(mark.passed for mark in each[1])]:
            self._limbo.remove(freed)
            self._give_back(freed[0])
        pool = self._pools[stream, size]
        if not pool:
            self._spared[stream] -= size
            if self._spared[stream] < 0:
                self._world.note(Work(takes=True))
        self._give_to(storage, pool.pop() if pool else self._made(size, stream))

    def _made(self, size: int, stream: SimulatedStream) -> Block:
        self.made_blocks[stream.rank] += 1
        with _plain():
            block = Block(torch.empty(size, dtype=torch.uint8), stream)
            block.spoil()
        return block

    def _give_to(self, storage: torch.UntypedStorage, block: Block) -> None:
        self._blocks[storage._cdata] = block
        weakref.finalize(storage, self._free, storage._cdata, block)

    def _free(self, key: int, block: Block) -> None:
        if self._blocks.get(key) is not block:
            return
        del self._blocks[key]
        if block.pinned:
            self._pinned[block.stream.rank].append(block)
            return
        if block.used_on:
            marks = [stream.mark() for stream in block.used_on]
            block.used_on = set()
            self._limbo.append((block, marks))
        else:
            self._give_back(block)

    def _give_back(self, block: Block) -> None:
        block.stream.items.append(block.spoil)
        self._pools[block.stream, block.memory.numel()].append(block)

    # What the host gives the device, and reads of it.

    def launch(self, work: Callable[[], object], views: Sequence[View]) -> None:
        """Put an operation with these views at the end of the current stream."""
        blocks = {view.block for view in views}
        for block in blocks:
            block.waiting += 1

        def run() -> None:
            work()
            for block in blocks:
                block.waiting -= 1

        self.current().items.append(run)
        self.go_on()

    def post(self, message: Message, group_stream: str) -> None:
        """Put a message on its communicator's stream, behind what the current stream has been
        given.
        """
        key = message.rank, group_stream
        if key not in self._of_communicator:
            self._of_communicator[key] = self.new_stream(message.rank, self._messages_first)
        stream = self._of_communicator[key]
        stream.wait_for(self.current().mark())
        self._messages[message.key][message.rank] = message
        for view in filter(None, {message.given, message.taken}):
            view.block.waiting += 1
            if self.RECORDS:
                view.block.used_on.add(stream)
        stream.items += (message, message.ended)
        self.go_on()

    def messages_under_way(self, rank: int) -> list[Message]:
        """Return those that this rank has posted and its device has not ended."""
        return [
            item
            for stream in self._streams[rank]
            for item in stream.items
            if isinstance(item, Message)
        ]

    def read(self, tensor: Tensor) -> None:
        """Let the host read a tensor: it waits, unless the tensor is in its own memory."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return
        if block.pinned:
            if block.waiting:
                raise RaceError("the host reads what has not been copied to its memory yet")
            self.headers[self._world.rank] += tensor.dtype == torch.int64
        else:
            self.host_waits(self.current().mark(), read=True)
        self.compare(tensor)

    def compare(self, tensor: Tensor) -> None:
        """Raise RaceError unless the device has what the host's order of calls gives."""
        with _plain():
            there, here = (
                each.contiguous().flatten().view(torch.uint8)
                for each in (self.view(tensor).tensor(), tensor.detach())
            )
            if not torch.equal(there, here):
                values = [
                    str(each.contiguous().numpy())
                    for each in (self.view(tensor).tensor(), tensor.detach())
                ]
                raise RaceError(
                    f"rank {self._world.rank} has {values[0]:.80} in place of {values[1]:.80}"
                )

    def host_waits(self, mark: Mark, *, read: bool = False) -> None:
        if not mark.passed or read:
            self._world.note(HostWait(mark.computed, read))
        self._world.until(lambda: mark.passed or self._run_until(mark))

    def wait_for_all(self) -> None:
        rank = self._world.rank
        self._world.note(DeviceWait())
        marks = [stream.mark() for stream in self._streams[rank]]
        self._world.until(lambda: all(mark.passed or self._run_until(mark) for mark in marks))

    def finish(self) -> None:
        """Let this worker's device end its work; not what the product does."""
        marks = [stream.mark() for stream in self._streams[self._world.rank]]
        self._world.until(lambda: all(mark.passed or self._run_until(mark) for mark in marks))

    # What the devices do.

    def go_on(self) -> None:
        """Do a few operations, or none."""
        if self._keeps_up and self.order.random() < self._keeps_up:
            with _plain():
                for _ in range(self.order.randrange(20)):
                    if not self._step():
                        break

    def _run_until(self, mark: Mark) -> bool:
        before = len(self.history)
        with _plain():
            while not mark.passed and self._step():
                pass
        if len(self.history) > before:
            self._world.tell()
        return mark.passed

    def _step(self) -> bool:
        """Let the ready stream of the highest priority do one operation; return whether there was
        one.
        """
        stream = self._newest
        # Mostly the same as before: to ask all of them takes longer than what they do.
        if stream is None or not self._is_ready(stream) or self.order.random() < 0.1:
            ready = [
                each
                for streams in self._streams.values()
                for each in streams
                if self._is_ready(each)
            ]
            if not ready:
                return False
            stream = self._newest = max(ready, key=lambda each: each.priority)
        if self.order.random() < 0.02:
            stream.draw()
        self._do(stream)
        self.history.append(stream.number)
        return True

    def _is_ready(self, stream: SimulatedStream) -> bool:
        if not stream.items:
            return False
        item = stream.items[0]
        if isinstance(item, tuple):
            return item[0].passed
        return not isinstance(item, Message) or not item.begun or self._may_end(item)

    def _may_end(self, message: Message) -> bool:
        met = self._messages[message.key]
        if message.kind == "all":
            return len(met) == message.members and all(each.begun for each in met.values())
        if message.kind == "send" and self._buffered:
            return True
        return any(
            (each.begun and each is not message) or each.left is not None for each in met.values()
        )

    def _do(self, stream: SimulatedStream) -> None:
        item = stream.items[0]
        if isinstance(item, Message):
            if not item.begun:
                item.begun = True
                if item.kind == "receive":
                    assert item.taken is not None
                    item.taken.tensor().view(torch.uint8).fill_(_SPOILED)
                return
            self._end(item)
        elif isinstance(item, Mark):
            item.passed = True
        elif not isinstance(item, tuple):
            item()
        stream.items.popleft()

    def _end(self, message: Message) -> None:
        """End this worker's part of an operation: what is given is read as late, and written as
        early, as may be.
        """
        met = self._messages[message.key]
        if message.kind == "all":
            # All parts are done by the first to end.
            if message.left is None:
                parts = [met[rank] for rank in sorted(met)]
                given = [part.given.tensor().clone() for part in parts if part.given is not None]
                for part in parts:
                    assert part.taken is not None
                    assert part.combine is not None
                    part.left = part.combine(given)
                    part.taken.tensor().copy_(part.left)
        elif message.kind == "send":
            self._send(message)
        else:
            sender = next(each for each in met.values() if each is not message)
            self._send(sender)
            assert message.taken is not None
            assert sender.left is not None
            message.taken.tensor().copy_(sender.left)
        for view in filter(None, {message.given, message.taken}):
            view.block.waiting -= 1

    def _send(self, message: Message) -> None:
        if message.left is None:
            assert message.given is not None
            message.left = message.given.tensor().clone()


class SimulatedRuntime(Runtime):
    """The seam of the product, with a simulated device behind it."""

    asynchronous = True
    backend = "nccl"

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def synchronize(self, device: object) -> None:
        self._devices.wait_for_all()

    def event(self, *, timing: bool = False) -> Any:
        return SimulatedEvent(self._devices)

    def anchor(self, device: object) -> Any:
        event = SimulatedEvent(self._devices)
        event.record()
        self.synchronize(device)
        return event, 0.0

    def stream(self, device: object) -> Any:
        return self._devices.new_stream(self._devices.current().rank)

    def current_stream(self, device: object) -> Any:
        return self._devices.current()

    def on(self, stream: Any) -> Any:
        return self._devices.on(stream)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        self._devices.keep(tensor, stream)

    def reserve(self, device: object, size_bytes: int) -> None:
        self._devices.reserve(size_bytes)

    def allocated_bytes(self, device: object) -> int:
        return self._devices.allocated_bytes()

    def peak_bytes(self, device: object) -> int:
        # what was freed is not kept for `reserve` to count on
        return self._devices.allocated_bytes()

    def pinned(self, size_bytes: int) -> Tensor:
        with _disable_current_modes():
            made = torch.empty(size_bytes, dtype=torch.uint8)
        self._devices.pin(made)
        return made

    def pin(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            made = tensor.clone()
        self._devices.pin(made)
        return made

    def copied(self, tensor: Tensor, device: object) -> Tensor:
        return tensor.clone()


class OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a worker's operations to its device; notes what allocates memory or launches a
    kernel.
    """

    def __init__(self, world: World, devices: Devices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._world, self._devices = world, devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            return NotImplemented  # it takes itself apart, and its parts come here
        if func.namespace == "_c10d_functional" and (
            carry_out := self._world.functional.get(func._opname)
        ):
            with self:  # its copies are the device's work, too
                return carry_out(*args)
        if func is torch.ops.aten.lift_fresh.default:
            self._devices.note_of_host(args[0])
        if func.is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        devices = self._devices
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        returns = func._schema.returns  # none where tensors of a list are written in place
        if returns and not any("Tensor" in str(each.type) for each in returns):
            for each in tensors:
                devices.read(each)
            return func(*args, **kwargs)
        if tensors and all(map(devices.is_of_host, tensors)):
            result = func(*args, **kwargs)
            for each in _tensors_in((result,)):
                devices.note_of_host(each)
            return result
        self._world.note(Work())
        given = _replaced((args, kwargs), Tensor, self._given)
        views = [*_tensors_in(given[0], View), *_tensors_in(given[1].values(), View)]
        result = func(*args, **kwargs)
        results = list(_tensors_in((result,)))
        made = [None if devices.knows(each) else devices.new(each) for each in results]
        if func in _UNWRITTEN:
            return result
        views += [each for each in made if each is not None]
        if torch.Tag.nondeterministic_seeded in func.tags:
            # The device draws what the host's order of calls draws.
            targets = [view or devices.view(each) for view, each in zip(made, results, strict=True)]
            drawn = [each.detach().clone() for each in results]
            devices.launch(lambda: _copy(targets, drawn), views)
        else:
            devices.launch(lambda: _carry_out(func, given, made), views)
        return result

    def _given(self, tensor: Tensor) -> View:
        return (
            self._devices.sent_along if self._devices.is_of_host(tensor) else self._devices.view
        )(tensor)


_UNWRITTEN = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


def _carry_out(func: Any, given: Any, made: list[View | None]) -> None:
    args, kwargs = _replaced(given, View, View.tensor)
    for view, result in zip(made, _tensors_in((func(*args, **kwargs),)), strict=True):
        if view is not None:
            view.tensor().copy_(result)


def _tensors_in(values: Iterable[Any], kind: type[Any] = Tensor) -> Iterator[Any]:
    """Yield the tensors among arguments or results, which are numbers, tensors, and lists
    of these.
    """
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value, kind)


def _replaced(value: Any, kind: type[Any], by: Callable[[Any], Any]) -> Any:
    """Return arguments with what stands for tensors replaced."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced(each, kind, by) for each in value])
    return (
        {key: _replaced(each, kind, by) for key, each in value.items()}
        if isinstance(value, dict)
        else value
    )


def _copy(targets: list[View], values: list[Tensor]) -> None:
    for view, value in zip(targets, values, strict=True):
        view.tensor().copy_(value)


def _size_of(storage: torch.UntypedStorage) -> int:
    return -(-max(1, storage.nbytes()) // _ROUND_BYTES) * _ROUND_BYTES


@contextmanager
def _plain() -> Iterator[None]:
    """Carry out operations as they are: not differentiated, cast or given to a device."""
    with _disable_current_modes(), torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        yield
