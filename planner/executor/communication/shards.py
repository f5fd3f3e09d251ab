"""The parts of parameters that replicas of a stage update where they divide its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.errors import ModelFileError

# Slices begin at multiples of so many elements. PyTorch computes the last few elements of a tensor one by one on a CPU,
# and others as vectors, with other roundings: with aligned slices each element is computed as in the whole tensor.
ALIGNMENT = 64


class Piece(NamedTuple):
    """Consecutive elements of one parameter, in the order of its memory, that belong to one replica."""

    parameter: int  # index in the bucket
    owner: int
    start: int  # of the parameter's elements
    stop: int
    at: int  # place of the first one in the owner's row


def divide(sizes: Sequence[int], replicas: int) -> tuple[list[Piece], int]:
    """Divide parameters of `sizes` elements into rows of equal length.

    Returns:
        The pieces, and the elements of a row: those of pieces, with gaps between them that align each parameter.
    """
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    row = -(-total // (replicas * ALIGNMENT)) * ALIGNMENT
    pieces = []
    for index, (first, size) in enumerate(zip(starts, sizes, strict=True)):
        for owner in range(replicas):
            start, stop = max(first, owner * row), min(first + size, (owner + 1) * row)
            if start < stop:
                pieces.append(Piece(index, owner, start - first, stop - first, start - owner * row))
    return pieces, row


def elements(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor` as one dimension, in the order in which `like` has its own in memory.

    A view, if `tensor` has that order, too.
    """
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(eq=False)
class Shard:
    """The part of a parameter that this replica updates."""

    parameter: nn.Parameter
    start: int  # of its elements, in the order of its memory
    stop: int
    stepped: nn.Parameter  # what the optimizer steps: these elements, wherever the parameter's `data` is

    @property
    def order(self) -> tuple[int, ...]:
        """The parameter's dimensions from the outermost in memory to the innermost: 0, 1, ... if it is contiguous."""
        strides = self.parameter.stride()
        return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a tensor of the parameter's shape."""
        return elements(whole, self.parameter)[self.start : self.stop]


def divided(state: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """Return an optimizer's state of a whole parameter for a shard of it: tensors of its shape are divided.

    Raises:
        ModelFileError: when a tensor is neither of the parameter's shape nor a number.
    """
    found = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
            found[key] = shard.of(value).clone()
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise ModelFileError(
                f"the optimizer keeps for a parameter of shape {tuple(shard.parameter.shape)} a tensor '{key}' of "
                f"shape {tuple(value.shape)}, which its stage's replicas cannot divide",
                hint="solve again with `shard_optimizer=never`",
            )
    return found


def shard_of(parameter: nn.Parameter, piece: Piece) -> Shard:
    """Return the shard of a parameter that a piece is."""
    own = elements(parameter.data, parameter)[piece.start : piece.stop]
    return Shard(parameter, piece.start, piece.stop, nn.Parameter(own))
