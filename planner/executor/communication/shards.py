"""The parts of parameters that replicas of a stage update where they divide its optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


def divide(sizes: Sequence[int], replicas: int, whole: Collection[int] = ()) -> tuple[list[Piece], int]:
    """Divide parameters of `sizes` elements into rows of equal length; those of `whole`, by index, have one owner each.

    Returns:
        The pieces, and the elements of a row: those of pieces, with gaps between them that align each parameter, and at
        the end of a row with fewer than the others.
    """
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    even = -(-total // (replicas * ALIGNMENT)) * ALIGNMENT
    bounds = [min(owner * even, total) for owner in range(replicas + 1)]
    for index in whole:
        first, last = starts[index], (*starts[1:], total)[index]
        nearer = [first if bound - first < last - bound else last for bound in bounds]
        bounds = [end if first < bound < last else bound for bound, end in zip(bounds, nearer, strict=True)]
    pieces = []
    for index, (first, size) in enumerate(zip(starts, sizes, strict=True)):
        for owner, (begin, end) in enumerate(pairwise(bounds)):
            start, stop = max(first, begin), min(first + size, end)
            if start < stop:
                pieces.append(Piece(index, owner, start - first, stop - first, start - begin))
    return pieces, max(end - begin for begin, end in pairwise(bounds))


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
    whole: bool  # all of its elements, which the optimizer sees in the parameter's shape, and else in one dimension
    stepped: nn.Parameter = field(init=False)  # what the optimizer steps, wherever the parameter's `data` is

    def __post_init__(self) -> None:
        self.stepped = nn.Parameter(self.of(self.parameter.data))

    @property
    def order(self) -> tuple[int, ...]:
        """The parameter's dimensions from the outermost in memory to the innermost: 0, 1, ... if it is contiguous."""
        strides = self.parameter.stride()
        return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a tensor of the parameter's shape."""
        return self.laid_out(elements(whole, self.parameter)[self.start : self.stop])

    def laid_out(self, part: Tensor) -> Tensor:
        """Return this part's elements, in one dimension, as the optimizer sees them."""
        return part.as_strided(self.parameter.shape, self.parameter.stride()) if self.whole else part


def divided(state: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """Return an optimizer's state of a whole parameter for a shard of it: tensors of its shape are divided.

    Nothing is, where the shard is the whole parameter.

    Raises:
        ModelFileError: when a tensor is neither of the parameter's shape nor a number.
    """
    found = dict(state)
    if shard.whole:
        return found
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
