"""Write values into messages and read them there, as the plan's codec codes them."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from planner.formats.names import Codec

_MOST = 127  # of an int8 whose negative exists, too
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a block of zeros


@dataclass(frozen=True)
class Cast:
    """The value's elements in `dtype`: its own, or a smaller one, to which they are rounded."""

    dtype: torch.dtype

    def place(self, buffer: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
        """Return the part of a buffer, from the byte `start` on, for a value of this shape."""
        return buffer.view(self.dtype).as_strided(
            shape, _strides(shape), start // self.dtype.itemsize
        )

    def write(self, place: Tensor, value: Tensor) -> None:
        """Write a value to its place."""
        place.copy_(value)

    def read(self, place: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the value at a place."""
        if self.dtype == dtype:
            return place
        return place.to(dtype)


@dataclass(frozen=True)
class Blocks:
    """Blocks of consecutive elements as int8, and then a float32 for each: its largest magnitude,
    over 127.

    The last block is filled up with zeros. Of a block with a NaN or an infinity, nothing that is
    read is finite.
    """

    block: int

    def place(self, buffer: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
        """Return the part of a buffer, from the byte `start` on, for a value of this shape."""
        blocks = -(-math.prod(shape) // self.block)
        return buffer[start : start + blocks * (self.block + torch.float32.itemsize)]

    def write(self, place: Tensor, value: Tensor) -> None:
        """Write a value to its place."""
        elements, scales = self._parts(place)
        flat = value.reshape(-1).float()
        missing = elements.numel() - len(flat)
        blocks = (pad(flat, (0, missing)) if missing else flat).view(-1, self.block)
        # Two passes take a quarter of the time of `aminmax`, which is not vectorised along rows.
        high = blocks.amax(1, keepdim=True)
        low = blocks.amin(1, keepdim=True)
        scale = torch.maximum(high, -low).div_(_MOST).clamp_(min=_LEAST_SCALE)
        elements.copy_((blocks / scale).round_())
        scales.copy_(scale)

    def read(self, place: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the value at a place."""
        elements, scales = self._parts(place)
        return (elements * scales).view(-1)[: math.prod(shape)].view(shape).to(dtype)

    def _parts(self, place: Tensor) -> tuple[Tensor, Tensor]:
        blocks = len(place) // (self.block + torch.float32.itemsize)
        end = blocks * self.block
        return place[:end].view(torch.int8).view(blocks, self.block), place[end:].view(
            torch.float32
        ).view(blocks, 1)


Coding = Cast | Blocks


@cache  # for every message, a lookup
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:  # of a contiguous tensor
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def coding_of(codec: Codec, size_bytes: int, dtype: torch.dtype) -> Coding:
    """Return the coding of a value of this size and type that has a gradient, or of its
    gradient.
    """
    if codec.size_bytes(size_bytes, dtype.itemsize) == size_bytes:
        return Cast(dtype)
    if codec.block:
        return Blocks(codec.block)
    return Cast(getattr(torch, codec.name))
