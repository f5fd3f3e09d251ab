"""The dimension along which ranks divide a value: where operations move it, and what its blocks
are.

Of several values that one product makes, such as query, key and value, a rank needs its heads of
each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from planner.model.torch_private import OpOverload

_aten = torch.ops.aten
_MOVES = (_aten.permute, _aten.transpose, _aten.contiguous, _aten.clone)


@dataclass(frozen=True)
class Packing:
    """The blocks of a product's outputs."""

    blocks: tuple[int, ...]  # their sizes
    # values that hold them one after the other, the product's first; the dimension
    packed: Mapping[fx.Node, int]
    # operations that take them apart; the dimension of their results that ranks divide
    opened: Mapping[fx.Node, int]


def packing(product: fx.Node) -> Packing | None:
    """Return what a product's outputs are blocks of; None where they are one."""
    size = shape_of(product)[-1]
    packed = {product: len(shape_of(product)) - 1}
    cuts = dict[fx.Node, set[int]]()
    dimensions = dict[fx.Node, int]()
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
        low = min(own)
        high = max(own)
        if sum(low <= border <= high for border in borders) != len(own):
            return None

    blocks = tuple(end - start for start, end in pairwise(borders))
    if len(blocks) > 1:
        return Packing(blocks, packed, dimensions)
    return None


def _opened(user: fx.Node, value: fx.Node, dimension: int) -> tuple[set[int], int] | None:
    """Return the borders of the blocks that an operation makes values of their own, and the
    dimension of those.
    """
    operation = packet_of(user)
    size = shape_of(value)[dimension]
    if along(user) == dimension:
        if operation in PARTS:
            sizes = [part.shape[dimension] for part in user.meta["val"]]
            return set(accumulate(sizes, initial=0)), dimension

        start = start_of(user) if _is_narrow(user) else None
        if isinstance(start, int):
            start %= size
            return {start, start + shape_of(user)[dimension]}, dimension

    if operation in VIEWS:
        outer = dimension_of(user, {value: dimension})
        if outer is not None:
            count = shape_of(user)[outer]
            if count < size and _taken_apart(user, outer):
                return set(range(0, size + 1, size // count)), outer + 1

    return None


def _is_narrow(node: fx.Node) -> bool:
    """Return whether an operation takes consecutive elements of a dimension."""
    if packet_of(node) is not _aten.slice:
        return packet_of(node) is _aten.narrow
    step = node.args[4] if len(node.args) > 4 else 1
    return isinstance(step, int) and step == 1


def start_of(node: fx.Node) -> Any:
    """Return where a slice begins."""
    return (node.args[2] if len(node.args) > 2 else 0) or 0  # None, too


def _taken_apart(node: fx.Node, dimension: int) -> bool:
    """Return whether the elements along a dimension become values of their own, as in
    `qkv.unbind(0)`.
    """
    for user in node.users:
        if along(user) == dimension and packet_of(user) in (*ONES, *PARTS):
            return True
        moved = None
        if packet_of(user) in _MOVES:
            moved = dimension_of(user, {node: dimension})
        if moved is not None and _taken_apart(user, moved):
            return True

    return False


def _kept(user: fx.Node, value: fx.Node, dimension: int) -> int | None:
    """Return where an operation on a packed value alone has the packed dimension; None where it has
    not.
    """
    others = (each for each in user.all_input_nodes if each is not value)
    if packet_of(user) is _aten.dropout or any(
        each.op == "get_attr" or shape_of(each) for each in others
    ):
        return None  # it would meet what is in the order of the whole

    after = dimension_of(user, {value: dimension})
    if after is not None and shape_of(user)[after] == shape_of(value)[dimension]:
        return after
    return None


class Product(NamedTuple):
    """Where a product has its weight, which follows the value that it multiplies, and what the
    dimensions are.
    """

    weight: int  # place among the arguments
    outputs: int  # dimension of the weight
    inputs: int


PRODUCTS: Mapping[Any, Product] = {
    _aten.linear.default: Product(1, 0, 1),
    _aten.addmm.default: Product(2, 1, 0),
    _aten.mm.default: Product(1, 1, 0),
    _aten.matmul.default: Product(1, 1, 0),
}


def weight_of(node: fx.Node) -> Any:
    """Return the weight of a product or an embedding; None for other operations."""
    if node.target is _aten.embedding.default:
        return node.args[0]
    product = PRODUCTS.get(node.target)
    if product is None:
        return None
    return node.args[product.weight]


def sums(node: fx.Node, cut: "Cut") -> bool:
    """Return whether the result of an operation with a divided weight is the sum of what the ranks
    compute.
    """
    return cut.dimension == (PRODUCTS[node.target].inputs if node.target in PRODUCTS else 0)


@dataclass(frozen=True)
class Cut:
    """Along which dimension a tensor is divided, and the blocks of it that are divided each."""

    dimension: int
    blocks: tuple[int, ...] = ()  # their sizes in the whole; none where the dimension is one block
    gathered: bool = False  # whether the outputs of the product with it are whole right behind

    def part(self, whole: Tensor, place: int, of: int) -> Tensor:
        """Return one of so many ranks' part."""
        blocks = torch.split(
            whole, list(self.blocks) or whole.shape[self.dimension], self.dimension
        )
        return torch.cat(
            [block.chunk(of, self.dimension)[place] for block in blocks], self.dimension
        )

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which these are all ranks' parts, in the order of the ranks."""
        sizes = [size // len(parts) for size in self.blocks] or parts[0].shape[self.dimension]
        blocks = zip(*(torch.split(part, sizes, self.dimension) for part in parts), strict=True)
        return torch.cat([piece for block in blocks for piece in block], self.dimension)

    def divides(self, size: int, of: int) -> bool:
        """Return whether so many ranks have parts of equal size."""
        return not any(each % of for each in self.blocks or [size])


VIEWS = (_aten.view, _aten.reshape, _aten.unflatten)
RESHAPES = (*VIEWS, _aten.flatten, _aten._unsafe_view, _aten.unsqueeze, _aten.squeeze)
COPIES = (_aten.clone, _aten.contiguous, _aten.to, _aten._to_copy, _aten.alias, _aten.detach)
_SAME = (*COPIES, _aten.dropout, _aten.expand)
# These compute, cut or join along a dimension, which is the argument in that place, or else the
# first one.
PARTS = (_aten.split, _aten.split_with_sizes, _aten.chunk)  # of their input, along a dimension
_ALONG = dict.fromkeys(PARTS, 2) | dict.fromkeys(
    (
        _aten.softmax,
        _aten._softmax,
        _aten.cat,
        _aten.slice,
        _aten.narrow,
        _aten.select,
        _aten.unbind,
    ),
    1,
)
# over the last dimensions, whose sizes are the second argument
_NORMS = (_aten.layer_norm, _aten.rms_norm)
_SUMS = (_aten.mean, _aten.sum, _aten.var)  # over the dimensions that are the second argument
ONES = (_aten.select, _aten.unbind)  # parts of a single element, without the dimension


def packet_of(node: fx.Node) -> Any:
    """Return the operation of a node, whatever its types of arguments; None for other code."""
    if isinstance(node.target, OpOverload):
        return node.target.overloadpacket
    return None


def shape_of(node: fx.Node) -> Sequence[Any]:
    """Return the shape of a node's result, or of the first of several; empty where it is no
    tensor.
    """
    value = node.meta.get("val")
    first = value
    if isinstance(value, (tuple, list)) and value:
        first = value[0]
    if not isinstance(first, Tensor):
        return ()
    return tuple(first.shape)


def is_tensor(node: fx.Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor)


def along(node: fx.Node) -> int | None:
    """Return the dimension of its input that an operation computes, cuts or joins along; None for
    other operations.
    """
    place = _ALONG.get(packet_of(node))
    if place is None:
        return None
    if len(node.args) > place:
        given = node.args[place]
    else:
        given = node.kwargs.get("dim", 0)
    return int(given) % len(shape_of(node.all_input_nodes[0]))  # type: ignore[arg-type]


def dimension_of(
    node: fx.Node, divided: Mapping[fx.Node, int], *, parts: bool = False
) -> int | None:
    """Return the dimension along which an operation's result is divided; None where it does not
    work on parts alone.

    `parts`: whether each rank may take its part of a whole value.
    """
    if node.target is getitem:
        return divided[node.all_input_nodes[0]]
    operation = packet_of(node)
    if operation is None or not shape_of(node):
        return None

    if operation is _aten.scaled_dot_product_attention:
        return _of_attention(node, divided)
    if operation in (_aten.matmul, _aten.bmm):
        return _of_batches(node, divided)
    if operation in _ALONG:
        return _of_other_dimensions(node, divided)
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if first in divided:
        dimension = divided[first]
        before = shape_of(first)
        after = shape_of(node)
        if operation in RESHAPES:
            return _viewed(before, after, dimension)
        if operation in (_aten.transpose, _aten.permute):
            return _moved(node, len(before), dimension)
        if operation in (*_NORMS, *_SUMS):
            return _of_sums(node, len(before), _first_dimension(divided))
        if operation in _SAME:
            dimension = _first_dimension(divided)
            same = len(before) == len(after) and before[dimension] == after[dimension]
            return dimension if same else None

    if torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
        return _pointwise(node, divided, parts)
    return None


def _first_dimension(divided: Mapping[fx.Node, int]) -> int:
    return divided[next(iter(divided))]


def _of_attention(node: fx.Node, divided: Mapping[fx.Node, int]) -> int | None:
    """Return the dimension of the heads, along which query, key and value are divided."""
    heads = {len(shape_of(source)) - 3 for source in divided}
    if node.args[0] in divided and set(divided.values()) == heads:
        return heads.pop()
    return None


def _of_batches(node: fx.Node, divided: Mapping[fx.Node, int]) -> int | None:
    """Return the dimension before the matrices along which both factors are divided."""
    dimension = _first_dimension(divided)
    matrices = len(shape_of(node)) - 2
    if len(divided) == 2 and set(divided.values()) == {dimension} and dimension < matrices:
        return dimension
    return None


def _of_other_dimensions(node: fx.Node, divided: Mapping[fx.Node, int]) -> int | None:
    """Return the dimension of an operation along another one, which all its inputs are divided
    along.
    """
    dimension = _first_dimension(divided)
    other = along(node)
    if other is None or other == dimension:
        return None
    sources = [source for source in node.all_input_nodes if shape_of(source)]
    if any(divided.get(source) != dimension for source in sources):
        return None
    if packet_of(node) in ONES and other < dimension:
        return dimension - 1
    return dimension


def _of_sums(node: fx.Node, dimensions: int, dimension: int) -> int | None:
    """Return the dimension of a norm or a sum whose input has so many dimensions, and is divided
    along one before those that it sums over.
    """
    over: Any = node.args[1] if len(node.args) > 1 else ()
    if packet_of(node) in _NORMS:
        over = range(-len(over), 0)
    if over and dimension < min(each % dimensions for each in over):
        return dimension
    return None


def _pointwise(node: fx.Node, divided: Mapping[fx.Node, int], parts: bool) -> int | None:
    shape = shape_of(node)
    found = {dimension - len(shape_of(source)) for source, dimension in divided.items()}
    if len(found) > 1:
        return None
    place = found.pop()
    for source in node.all_input_nodes:
        others = shape_of(source)
        if source not in divided and not parts and len(others) >= -place and others[place] != 1:
            return None  # a whole value, of which each rank would need its part

    return place + len(shape)


def _viewed(before: Sequence[Any], after: Sequence[Any], dimension: int) -> int | None:
    """Return where a divided dimension is in another view: outermost of those that it is split into
    or joined with.
    """
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
    order = list(range(rank))
    given = node.args[1:]
    if node.target is _aten.permute.default:
        order = [int(each) % rank for each in given[0]]  # type: ignore[arg-type,union-attr]
    else:
        one, other = (int(each) % rank for each in given[:2])  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
    return order.index(dimension)
