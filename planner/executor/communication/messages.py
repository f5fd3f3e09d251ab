"""The content of a message: for one pair of stages and one unit, a header and then every value, in one flat buffer.

    header:       two int64, magic and layout checksum, minibatch and microbatch      (64 bytes, the rest anything)
    payload:      the values in the plan's order, each in its own memory order, at a multiple of 64 bytes

gloo accepts a message of the wrong size, and NCCL matches messages by order alone: both would deliver garbage without
an error. The header makes a mismatch an error. It is written by two fills and never copied from the host, because such
a copy would let the host wait for the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.errors import WorkerError
from planner.model.capture.graph import ValueSpec
from planner.schedule.instructions import Unit

_ALIGNMENT = 64  # bytes: a cache line, and enough for vector instructions of any width
_MAGIC = 0x706C616E  # "plan"
_WORDS = 2  # of the header
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Slot:
    """The place of one value in the buffer; `wire_shape` is its shape in memory order."""

    spec: ValueSpec
    shape: tuple[int, ...]
    wire_shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The buffer of a message. It follows from the values and the batch size, so each end computes it by itself."""

    batch_size: int
    slots: tuple[Slot, ...]
    size_bytes: int
    checksum: int


def layout_of(specs: Sequence[ValueSpec], batch_size: int) -> Layout:
    """Lay out `specs` for a microbatch of `batch_size` samples."""
    slots: list[Slot] = []
    start = _ALIGNMENT
    for spec in specs:
        end = start + spec.size_bytes(batch_size)
        slots.append(Slot(spec, spec.shape(batch_size), spec.wire_shape(batch_size), start, end))
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
    described = [(slot.spec.name, slot.spec.dtype, slot.wire_shape, slot.spec.order) for slot in slots]
    checksum = zlib.crc32(repr(described).encode())
    return Layout(batch_size, tuple(slots), start, checksum)


def pack(layout: Layout, unit: Unit, values: Mapping[str, Tensor], wire: torch.device) -> Tensor:
    """Copy `values` into a new uint8 buffer on device `wire`.

    Raises:
        WorkerError: when a value has another shape or dtype than the captured graph says.
    """
    buffer = torch.empty(layout.size_bytes, dtype=torch.uint8, device=wire)
    first_bytes = header(buffer)
    for place, word in enumerate(_words(layout, unit)):
        first_bytes[place] = word
    for slot in layout.slots:
        value = values[slot.spec.name]
        if tuple(value.shape) != slot.shape or value.dtype != slot.spec.dtype:
            raise WorkerError(
                f"value '{slot.spec.name}' is {value.dtype} of shape {tuple(value.shape)}, the captured graph says "
                f"{slot.spec.dtype} of shape {slot.shape}",
                hint="a shape that depends on the data cannot cross a cut; keep the layers around it in one stage",
            )
        target, source = _view(buffer, slot), slot.spec.to_wire(value.detach())
        if source.device.type == "cpu" and source.dim() == 0:
            target.fill_(source.item())  # a loss scale: copied to a GPU, it would let the host wait
        else:
            target.copy_(source)
    return buffer


def header(buffer: Tensor) -> Tensor:
    """Return the header of the message in `buffer`, as a view."""
    return buffer[: 8 * _WORDS].view(torch.int64)


def check(layout: Layout, unit: Unit, found: Tensor, sender: str) -> None:
    """Check that a message is the expected one.

    Args:
        layout: of the expected message.
        unit: of the expected message.
        found: the header of the message, on the CPU.
        sender: for the error.

    Raises:
        WorkerError: when it is another.
    """
    words = found.tolist()
    if words == _words(layout, unit):
        return
    checksum, minibatch, microbatch = words[0] & _LOW, words[1] >> 32, words[1] & _LOW
    raise WorkerError(
        f"{sender} sent minibatch {minibatch}, microbatch {microbatch}, layout {checksum:#x}; expected minibatch "
        f"{unit.minibatch}, microbatch {unit.microbatch}, layout {layout.checksum:#x}",
        hint="do all hosts run the same version of the planner, the model file and the plan?",
    )


def unpack(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    """Return the values in `buffer`, as views of it."""
    return {slot.spec.name: slot.spec.from_wire(_view(buffer, slot), layout.batch_size) for slot in layout.slots}


def _words(layout: Layout, unit: Unit) -> list[int]:
    return [_MAGIC << 32 | layout.checksum, unit.minibatch << 32 | unit.microbatch]


def _view(buffer: Tensor, slot: Slot) -> Tensor:
    return buffer[slot.start : slot.end].view(slot.spec.dtype).view(slot.wire_shape)
