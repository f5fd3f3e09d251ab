"""The content of a message: for one pair of stages and one unit, a header and then every value, in one flat buffer.

    int64 header: magic, minibatch, microbatch, layout checksum      (64 bytes, the rest zero)
    payload:      the values in the plan's order, each in its own memory order, at a multiple of 64 bytes

gloo accepts a message of the wrong size, and NCCL matches messages by order alone: both would deliver garbage without
an error. The header makes a mismatch an error.
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
    header = torch.tensor([_MAGIC, unit.minibatch, unit.microbatch, layout.checksum, 0, 0, 0, 0])
    buffer[:_ALIGNMENT].view(torch.int64).copy_(header)
    for slot in layout.slots:
        value = values[slot.spec.name]
        if tuple(value.shape) != slot.shape or value.dtype != slot.spec.dtype:
            raise WorkerError(
                f"value '{slot.spec.name}' is {value.dtype} of shape {tuple(value.shape)}, the captured graph says "
                f"{slot.spec.dtype} of shape {slot.shape}",
                hint="a shape that depends on the data cannot cross a cut; keep the layers around it in one stage",
            )
        _view(buffer, slot).copy_(slot.spec.to_wire(value.detach()))
    return buffer


def unpack(layout: Layout, unit: Unit, buffer: Tensor, sender: str) -> dict[str, Tensor]:
    """Return the values in `buffer`, as views of it.

    Raises:
        WorkerError: when it is not the expected message.
    """
    # Reads four numbers on the host: where the buffer is on a GPU, this waits for the transfer.
    magic, minibatch, microbatch, checksum = buffer[:_ALIGNMENT].view(torch.int64)[:4].tolist()
    if (magic, minibatch, microbatch, checksum) != (_MAGIC, unit.minibatch, unit.microbatch, layout.checksum):
        raise WorkerError(
            f"{sender} sent minibatch {minibatch}, microbatch {microbatch}, layout {checksum:#x}; expected minibatch "
            f"{unit.minibatch}, microbatch {unit.microbatch}, layout {layout.checksum:#x}",
            hint="do all hosts run the same version of the planner, the model file and the plan?",
        )
    return {slot.spec.name: slot.spec.from_wire(_view(buffer, slot), layout.batch_size) for slot in layout.slots}


def _view(buffer: Tensor, slot: Slot) -> Tensor:
    return buffer[slot.start : slot.end].view(slot.spec.dtype).view(slot.wire_shape)
