"""Where an operation's result has the dimension along which ranks divide what it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
VIEWS = (_aten.view, _aten.reshape, _aten.unflatten)
_RESHAPES = (*VIEWS, _aten.flatten, _aten._unsafe_view, _aten.unsqueeze, _aten.squeeze)
_SAME = (
    _aten.clone,
    _aten.contiguous,
    _aten.to,
    _aten._to_copy,
    _aten.alias,
    _aten.detach,
    _aten.dropout,
    _aten.expand,
)
# These compute, cut or join along a dimension, which is the argument in that place, or else the first one.
_ALONG = {
    _aten.softmax: 1,
    _aten._softmax: 1,
    _aten.cat: 1,
    _aten.slice: 1,
    _aten.narrow: 1,
    _aten.select: 1,
    _aten.unbind: 1,
    _aten.split: 2,
    _aten.split_with_sizes: 2,
    _aten.chunk: 2,
}
PARTS = (_aten.split, _aten.split_with_sizes, _aten.chunk)  # of their input, along a dimension
ONES = (_aten.select, _aten.unbind)  # parts of a single element, without the dimension


def packet_of(node: fx.Node) -> Any:
    """Return the operation of a node, whatever its types of arguments; None for other code."""
    return node.target.overloadpacket if isinstance(node.target, torch._ops.OpOverload) else None


def shape_of(node: fx.Node) -> Sequence[Any]:
    """Return the shape of a node's result, or of the first of several; empty where it is no tensor."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def along(node: fx.Node) -> int | None:
    """Return the dimension of its input that an operation computes, cuts or joins along; None for other operations."""
    place = _ALONG.get(packet_of(node))
    if place is None:
        return None
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return int(given) % len(shape_of(node.all_input_nodes[0]))  # type: ignore[arg-type]


def dimension_of(node: fx.Node, divided: Mapping[fx.Node, int]) -> int | None:
    """Return the dimension along which an operation's result is divided; None where it does not work on parts alone.

    Args:
        divided: those of the values that it reads.
    """
    if node.target is getitem:
        return divided[node.all_input_nodes[0]]
    operation, first = packet_of(node), node.args[0] if node.args else None
    if operation is None or not shape_of(node):
        return None
    dimension = divided[next(iter(divided))]
    if operation is _aten.scaled_dot_product_attention:
        heads = {len(shape_of(source)) - 3 for source in divided}
        return heads.pop() if set(divided.values()) == heads and first in divided else None
    if operation in (_aten.matmul, _aten.bmm):
        batch = len(divided) == 2 and set(divided.values()) == {dimension} and dimension < len(shape_of(node)) - 2
        return dimension if batch else None
    if operation in _ALONG:
        own = along(node)
        same = all(divided.get(each) == dimension for each in node.all_input_nodes if shape_of(each))
        return (
            None if own is None or not same or own == dimension else dimension - (operation in ONES and own < dimension)
        )
    if not isinstance(first, fx.Node):
        return None
    if operation in _RESHAPES and first in divided:
        return _viewed(shape_of(first), shape_of(node), divided[first])
    if operation in (_aten.transpose, _aten.permute) and first in divided:
        return _moved(node, len(shape_of(first)), divided[first])
    if operation in _SAME and first in divided:
        before, after = shape_of(first), shape_of(node)
        same = len(before) == len(after) and before[dimension] == after[dimension]
        return dimension if same else None
    return _pointwise(node, divided) if torch.Tag.pointwise in node.target.tags else None  # type: ignore[union-attr]


def _pointwise(node: fx.Node, divided: Mapping[fx.Node, int]) -> int | None:
    """Return the dimension of a result whose elements come from elements in the same place."""
    shape = shape_of(node)
    found = {dimension - len(shape_of(source)) for source, dimension in divided.items()}
    if len(found) > 1:
        return None
    place = found.pop()
    for source in node.all_input_nodes:
        others = shape_of(source)
        if source not in divided and len(others) >= -place and others[place] != 1:
            return None  # a whole value, of which each rank would need its part
    return place + len(shape)


def _viewed(before: Sequence[Any], after: Sequence[Any], dimension: int) -> int | None:
    """Return where a divided dimension is in another view: outermost of those that it is split into or joined with."""
    if not all(isinstance(size, int) for size in before[dimension:]):
        return None
    elements = math.prod(before[dimension:])
    for place in reversed(range(len(after))):
        if not isinstance(after[place], int):
            return None
        if math.prod(after[place:]) == elements and after[place] > 1:
            return place
    return None


def _moved(node: fx.Node, rank: int, dimension: int) -> int:
    """Return where transpose or permute moves a dimension."""
    order, given = list(range(rank)), node.args[1:]
    if node.target is _aten.permute.default:
        order = [int(each) % rank for each in given[0]]  # type: ignore[arg-type,union-attr]
    else:
        one, other = (int(each) % rank for each in given[:2])  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
    return order.index(dimension)
