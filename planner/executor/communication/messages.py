"""The content of a message: for one pair of stages and one unit, a header and then every value, in
one flat buffer.

    header:       an int64 of layout checksum, minibatch and microbatch
                  (64 bytes, the rest anything)
    payload:      the values in the plan's order, each in its own memory order and coded,
                  at a multiple of 64 bytes

gloo accepts a message of the wrong size, and NCCL matches messages by order alone: the header makes
that an error. It is written by a fill and never copied from the host, because such a copy would let
the host wait for the device.
"""

import ctypes
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from planner.errors import WorkerError
from planner.executor.communication.shared_gradients import SharedGradients
from planner.formats.files import replace
from planner.formats.names import CODECS, Codec
from planner.model.capture.graph import ValueSpec
from planner.model.capture.size import MOST_EXTENTS, Extent
from planner.runtime import runtime_of
from planner.schedule import instructions as do
from planner.schedule.instructions import Receive, Send, Unit
from planner.workers.coding import Coding, coding_of

# the sender's scale, as a value of a message of gradients; no operation's name has a space
SCALE = "loss scale"
_ALIGNMENT = 64  # bytes: a cache line, and enough for vector instructions of any width
# what fits into the header, from its top to its bottom
_CHECKSUM = 0x7FFF
_MINIBATCH = 0xFFFFFFFF
_MICROBATCH = 0xFFFF


@dataclass(frozen=True)
class Slot:
    """The place of one value in the buffer."""

    spec: ValueSpec
    shape: tuple[int, ...]
    wire_shape: tuple[int, ...]  # in memory order
    start: int  # in bytes
    coding: Coding

    def place(self, buffer: Tensor) -> Tensor:
        """Return the part of a message's buffer that holds the value."""
        return self.coding.place(buffer, self.start, self.wire_shape)


@dataclass(frozen=True)
class Layout:
    """The buffer of a message. It follows from the values and the batch's extent, so each end
    computes it by itself.
    """

    extent: Extent
    slots: tuple[Slot, ...]
    size_bytes: int
    checksum: int
    room_bytes: int  # of the buffer: what the longest message on the same way takes

    def part_of(self, memory: Tensor) -> Tensor:
        """Return the part of a buffer that the message takes; the longest one takes all, which
        saves a view of it.
        """
        if self.room_bytes == self.size_bytes:
            return memory
        return memory[: self.size_bytes]


def layout_of(specs: Sequence[ValueSpec], extent: Extent, codec: Codec = CODECS["none"]) -> Layout:
    """Lay out `specs` for a microbatch of this extent, those with gradients as `codec`
    codes them.
    """
    slots: list[Slot] = []
    start = _ALIGNMENT
    for spec in specs:
        size = spec.size_bytes(extent)
        own = codec if spec.requires_grad else CODECS["none"]
        coding = coding_of(own, size, spec.dtype)
        slots.append(Slot(spec, spec.shape(extent), spec.wire_shape(extent), start, coding))
        start += -(-own.size_bytes(size, spec.dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT

    described = [
        (slot.spec.name, slot.spec.dtype, slot.wire_shape, slot.spec.order, slot.coding)
        for slot in slots
    ]
    checksum = zlib.crc32(repr(described).encode()) & _CHECKSUM
    return Layout(extent, tuple(slots), start, checksum, start)


class Outgoing:
    """The buffer of a message to send, with views, which take longer to make than to fill again for
    the next one.
    """

    __slots__ = ("_places", "_write_header", "buffer", "layout", "memory")

    def __init__(self, layout: Layout, wire: torch.device, memory: Tensor | None = None) -> None:
        self.layout = layout
        # That of an earlier message with another length, if it is as large.
        if memory is None or len(memory) != layout.room_bytes:
            memory = torch.empty(layout.room_bytes, dtype=torch.uint8, device=wire)
        self.memory = memory
        self.buffer = layout.part_of(memory)
        # Where nothing is later than the host it is written at its address: a fill takes longer
        # than all else.
        here = not runtime_of(wire).asynchronous
        self._write_header = (
            partial(setattr, _at(self.buffer), "value") if here else header(self.buffer).fill_
        )
        self._places = [(slot, slot.spec.name, slot.place(self.buffer)) for slot in layout.slots]

    def fill(self, unit: Unit, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into the buffer; raise WorkerError when one is not what the captured graph
        says.
        """
        self._write_header(_word(self.layout, unit))
        for slot, name, place in self._places:
            value = values[name]
            if value.shape != slot.shape or value.dtype != slot.spec.dtype:
                raise WorkerError(
                    f"value '{name}' is {value.dtype} of shape {tuple(value.shape)}, the captured "
                    f"graph says "
                    f"{slot.spec.dtype} of shape {slot.shape}",
                    hint="a shape that depends on the data cannot cross a cut; keep the layers "
                    "around it in one stage",
                )
            slot.coding.write(
                place, slot.spec.to_wire(value.detach() if value.requires_grad else value)
            )


def header(buffer: Tensor) -> Tensor:
    """Return the first number of a buffer, which says what it carries."""
    return buffer.view(torch.int64)[0]


def header_here(buffer: Tensor) -> int:
    """Return the header of the message in `buffer`, which is in the CPU's memory."""
    # At its address: to make views and read those takes as long as all else that a receiver does.
    return _at(buffer).value


def _at(buffer: Tensor) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(buffer.data_ptr())


def check(layout: Layout, unit: Unit, word: int, sender: int) -> None:
    """Raise WorkerError if a message of rank `sender`, with the header `word`, is not the expected
    one.
    """
    if word == _word(layout, unit):
        return
    checksum = word >> 48 & _CHECKSUM
    minibatch = word >> 16 & _MINIBATCH
    microbatch = word & _MICROBATCH
    raise WorkerError(
        f"rank {sender} sent minibatch {minibatch}, microbatch {microbatch}, layout "
        f"{checksum:#x}; expected minibatch "
        f"{unit.minibatch}, microbatch {unit.microbatch}, layout {layout.checksum:#x}",
        hint="do all hosts run the same version of the planner, the model file and the plan?",
    )


def unpack(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    """Return the values in `buffer`, as views of it where they are not coded."""
    values = {}
    for slot in layout.slots:
        decoded = slot.coding.read(slot.place(buffer), slot.spec.dtype, slot.wire_shape)
        values[slot.spec.name] = slot.spec.from_wire(decoded, layout.extent)
    return values


def _word(layout: Layout, unit: Unit) -> int:
    return layout.checksum << 48 | unit.minibatch << 16 | unit.microbatch


class Layouts:
    """Layouts by message.

    Args:
        transfers: by (source, target) stage, the values that travel to and from this worker's
            stages.
        shared: by stage, gradients of the weights that it shares with other stages.
        extent_of: a unit's microbatch.
        longest: the greatest of each length that varies, for which buffers have room.
        with_scale: whether each message of gradients carries the loss scale that they were computed
            with.
    """

    def __init__(
        self,
        transfers: Mapping[tuple[int, int], Sequence[ValueSpec]],
        shared: Mapping[int, SharedGradients],
        extent_of: Callable[[Unit], Extent],
        longest: tuple[int, ...] = (),
        *,
        with_scale: bool,
        codec: Codec = CODECS["none"],
    ) -> None:
        self._transfers = transfers
        self._shared = shared
        self._extent_of = extent_of
        self._longest = longest
        self._with_scale = with_scale
        self._codec = codec
        self._made = lru_cache(MOST_EXTENTS)(self._make)

    def layout(self, message: Receive | Send) -> Layout:
        """Return the layout of `message`, which both ends compute alike."""
        extent = self._extent_of(message.unit)
        kind = type(message)
        return self._made(kind, message.stage, message.peer_stage, extent)  # type: ignore[arg-type]

    def received_bytes(
        self, source: int, target: int, *, forward: bool, shared: bool, samples: int
    ) -> int:
        """Return the room for a message from stage `source` to the later `target`, or back, of
        `samples` samples.
        """
        kind: type[Receive] = do.ReceiveActivation if forward else do.ReceiveGradient
        if shared:
            kind = do.ReceiveShared
        ends = (target, source) if forward else (source, target)
        extent = (samples, *self._longest) if self._longest else samples
        return self._make(kind, *ends, extent).size_bytes

    def _make(self, kind: type[Receive | Send], stage: int, peer: int, extent: Extent) -> Layout:
        if issubclass(kind, (do.ReceiveShared, do.SendShared)):
            return layout_of(self._shared[stage].specs(peer), 1)

        specs = list(self._transfers[min(stage, peer), max(stage, peer)])
        if not issubclass(kind, (do.ReceiveActivation, do.SendActivation)):
            specs = self._of_gradients(specs)
        layout = layout_of(specs, extent, self._codec)

        # Messages of fewer elements use the buffers of the longest.
        if isinstance(extent, tuple) and extent[1:] != self._longest:
            longest = layout_of(specs, (extent[0], *self._longest), self._codec)
            layout = replace(layout, room_bytes=longest.size_bytes)

        return layout

    def _of_gradients(self, specs: Sequence[ValueSpec]) -> list[ValueSpec]:
        """Return the specs of the gradients of some values, and of the scale of the loss."""
        gradients = [spec.of_gradient for spec in specs if spec.requires_grad]
        if self._with_scale:
            gradients.append(
                ValueSpec(SCALE, torch.float32, requires_grad=False, sizes=(), order=())
            )
        return gradients
