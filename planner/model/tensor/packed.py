"""Products that make several values at once, such as query, key and value.

The weight of such a product is one parameter, whose blocks are the weights of the values. A part of the whole would be
query for one rank and value for another; a rank needs its heads of each. What the blocks are is found in the graph:
where the product's result is taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import fx

from planner.model.tensor.dimensions import ONES, PARTS, VIEWS, along, dimension_of, packet_of, shape_of

_aten = torch.ops.aten
_MOVES = (_aten.permute, _aten.transpose, _aten.contiguous, _aten.clone)


@dataclass(frozen=True)
class Packing:
    """The blocks of a product's outputs.

    Attributes:
        blocks: their sizes.
        packed: the values that hold them one after the other, the product's own first; by each, the dimension.
        opened: the operations that take them apart; by each, the dimension of its results that ranks divide.
    """

    blocks: tuple[int, ...]
    packed: Mapping[fx.Node, int]
    opened: Mapping[fx.Node, int]


def packing(product: fx.Node) -> Packing | None:
    """Return what a product's outputs are blocks of; None where they are one."""
    size = shape_of(product)[-1]
    packed, cuts, dimensions = {product: len(shape_of(product)) - 1}, dict[fx.Node, set[int]](), dict[fx.Node, int]()
    ahead = [product]
    while ahead:
        value = ahead.pop()
        dimension = packed[value]
        for user in value.users:
            if not shape_of(user):
                continue  # it reads the value's size
            if (found := _opened(user, value, dimension)) is not None:
                cuts[user], dimensions[user] = found
            elif (after := _kept(user, value, dimension)) is not None:
                packed[user] = after
                ahead.append(user)
            else:
                return None
    borders = sorted({0, size}.union(*cuts.values()))
    # A slice is one block, and all other operations take apart all of them.
    for own in cuts.values():
        low, high = min(own), max(own)
        if sum(low <= border <= high for border in borders) != len(own):
            return None
    blocks = tuple(end - start for start, end in pairwise(borders))
    return Packing(blocks, packed, dimensions) if len(blocks) > 1 else None


def _opened(user: fx.Node, value: fx.Node, dimension: int) -> tuple[set[int], int] | None:
    """Return the borders of the blocks that an operation makes values of their own, and the dimension of those."""
    operation = packet_of(user)
    if along(user) == dimension:
        if operation in PARTS:
            sizes = [part.shape[dimension] for part in user.meta["val"]]
            return set(accumulate(sizes, initial=0)), dimension
        if operation in (_aten.slice, _aten.narrow):
            size, start = shape_of(value)[dimension], user.args[2] if len(user.args) > 2 else 0
            step = user.args[4] if operation is _aten.slice and len(user.args) > 4 else 1
            start = start or 0  # None, too
            if isinstance(start, int) and step == 1:
                start %= size
                return {start, start + shape_of(user)[dimension]}, dimension
    if operation in VIEWS:
        outer = dimension_of(user, {value: dimension})
        count, size = (shape_of(user)[outer], shape_of(value)[dimension]) if outer is not None else (1, 1)
        if outer is not None and count < size and _taken_apart(user, outer):
            return set(range(0, size + 1, size // count)), outer + 1
    return None


def _taken_apart(node: fx.Node, dimension: int) -> bool:
    """Return whether the elements along a dimension become values of their own, as in `qkv.unbind(0)`."""
    for user in node.users:
        if along(user) == dimension and packet_of(user) in (*ONES, *PARTS):
            return True
        if packet_of(user) in _MOVES:
            moved = dimension_of(user, {node: dimension})
            if moved is not None and _taken_apart(user, moved):
                return True
    return False


def _kept(user: fx.Node, value: fx.Node, dimension: int) -> int | None:
    """Return where an operation on a packed value alone has the packed dimension; None where it has not."""
    others = (each for each in user.all_input_nodes if each is not value)
    if packet_of(user) is _aten.dropout or any(each.op == "get_attr" or shape_of(each) for each in others):
        return None  # it would meet what is in the order of the whole
    after = dimension_of(user, {value: dimension})
    return after if after is not None and shape_of(user)[after] == shape_of(value)[dimension] else None
