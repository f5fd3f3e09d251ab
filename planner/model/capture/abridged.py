"""Leave out all but a few of a model's equal blocks, whose costs one of them tells.

A transformer has dozens of equal blocks, and what a step of one costs, the steps of all cost. The
first two may do more than the others, as they take what an embedding made, and what the last one
makes goes elsewhere. So these stay, with one that stands for those left out and the one before it.

    blocks    0  1  2  3  4  5  6  7
    run       0  1  2  3           7     7 takes what 3 makes, and 3 stands for 4, 5 and 6

Blocks may be equal in turn, as where each second one has a window. Then as many as a turn has
stand for the others. They end with one that is equal to the last but one, whose place it takes.

    blocks    0a 1b 2a 3b 4a 5b 6a 7b 8a 9b
    run       0a 1b 2a 3b 4a             9b     9 takes what 4 makes; 3 stands for 5 and 7, 4 for
                                                6 and 8
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from planner.formats.files import replace
from planner.model.capture.graph import LayerGraph
from planner.model.capture.size import is_symbolic
from planner.model.torch_private import tree_flatten

_FIRST = 3  # the number of the first block that may stand for others
_LONGEST_TURN = 6  # blocks: five with a window and one without (Gemma 3)
_FEWEST_SPARED = 2  # blocks that make it worth while


@contextmanager
def abridged(graph: LayerGraph) -> Iterator[tuple[LayerGraph, list[int]]]:
    """Give a graph without all but few of its equal blocks, and for each layer the one that stands
    for it.

    The layers are positions in the shorter graph. While the context lasts, the operations after
    what is left out take the values of the block that stands for it, in the given graph, too.
    """
    kept = list(range(len(graph.layers)))
    stands = list(kept)
    seams = _Seams()
    for found in _equal_blocks(graph):
        blocks = found.blocks
        for number in found.spared:
            block = blocks[number]
            stands[block.start : block.stop] = blocks[found.stand_of(number)].positions
            kept = [position for position in kept if position not in block.positions]
        seams.join(blocks[found.spared.start - 1], blocks[-2], blocks[-1])

    place = {position: index for index, position in enumerate(kept)}
    shorter = graph
    if len(kept) < len(graph.layers):
        shorter = replace(graph, layers=tuple(graph.layers[position] for position in kept))
    try:
        yield shorter, [place[position] for position in stands]
    finally:
        seams.undo()


class _Seams:
    """Operations that take the values of another block for a while."""

    def __init__(self) -> None:
        self._arguments: list[tuple[fx.Node, Any, Any]] = []
        self._users: dict[fx.Node, dict[fx.Node, None]] = {}

    def join(self, first: "_Block", spared: "_Block", last: "_Block") -> None:
        """Let a block take the values of the first one in place of those of the last spared one."""
        replaced = dict(zip(spared.nodes, first.nodes, strict=True))
        for node in (*first.nodes, *spared.nodes):
            self._users[node] = dict(node.users)

        for node in last.nodes:
            taken = [source for source in node.all_input_nodes if source in replaced]
            if taken:
                self._arguments.append((node, node.args, node.kwargs))
            for source in taken:
                node.replace_input_with(source, replaced[source])

    def undo(self) -> None:
        """Let all operations take again what they took."""
        for node, args, kwargs in self._arguments:
            node.args = args
            node.kwargs = kwargs
        # Their order decides in which order a profile lists its edges.
        for node, users in self._users.items():
            node.users.clear()
            node.users.update(users)


@dataclass(frozen=True)
class _Block:
    """A block of a list: the prefix of its names, its layers, and their operations."""

    prefix: str
    positions: range
    nodes: tuple[fx.Node, ...]

    @property
    def start(self) -> int:
        return self.positions.start

    @property
    def stop(self) -> int:
        return self.positions.stop


@dataclass(frozen=True)
class _EqualBlocks:
    """Blocks of a list that are equal in turn.

    Attributes:
        blocks: all of the list.
        turn: how many a turn has; 1 where all are equal.
    """

    blocks: list[_Block]
    turn: int

    @property
    def spared(self) -> range:
        """The numbers of the blocks that need not run."""
        last = len(self.blocks) - 1
        fewest = _FIRST + self.turn
        # The last one that stands for others is equal to the last spared one.
        return range(fewest + (last - fewest) % self.turn, last)

    def stand_of(self, number: int) -> int:
        """Return the number of the block that stands for a spared one."""
        return number - self.turn * (1 + (number - self.spared.start) // self.turn)


def _equal_blocks(graph: LayerGraph) -> Iterator[_EqualBlocks]:
    """Yield the blocks of each list whose blocks after the first two are equal, perhaps in turn,
    and take nothing but what the one before makes, and what was there before all of them.
    """
    for path, module in graph.model.named_modules():
        inside_a_block = re.search(r"(^|\.)\d+(\.|$)", path)  # as experts are
        if inside_a_block or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        names = list(module._modules)
        if names != [str(number) for number in range(len(names))]:
            continue
        if _share_weights(module):
            continue

        prefixes = (f"{path}.{name}.".removeprefix(".") for name in names)
        found = [_block(graph, prefix) for prefix in prefixes]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(names):
            continue
        for turn in range(1, _LONGEST_TURN + 1):
            equal = _EqualBlocks(blocks, turn)
            if len(equal.spared) >= _FEWEST_SPARED and _are_equal(graph, equal):
                yield equal
                break


def _share_weights(blocks: nn.Module) -> bool:
    """Return whether one of the blocks has a weight of another one."""
    weights = [
        id(weight)
        for block in blocks.children()
        for weight in (*block.parameters(), *block.buffers())
    ]
    return len(set(weights)) < len(weights)


def _block(graph: LayerGraph, prefix: str) -> _Block | None:
    """Return a block, unless it has no layers of its own or those of others are between them."""
    positions = [
        position
        for position, layer in enumerate(graph.layers)
        if f"{layer.name}.".startswith(prefix)
    ]
    if not positions or positions[-1] - positions[0] + 1 > len(positions):
        return None
    nodes = tuple(node for position in positions for node in graph.layers[position].nodes)
    return _Block(prefix, range(positions[0], positions[-1] + 1), nodes)


def _are_equal(graph: LayerGraph, found: _EqualBlocks) -> bool:
    """Return whether each block from the fourth on does with the one before what the block one turn
    later does with the one before that.
    """
    blocks = found.blocks
    for before, own in pairwise(blocks[_FIRST - 1 :]):
        if before.stop != own.start or _used_elsewhere(graph, before, own):
            return False

    pairs = list(pairwise(blocks[_FIRST - 1 :]))
    return all(
        _Comparison(graph, one, other).follows()
        for one, other in zip(pairs, pairs[found.turn :], strict=False)
    )


def _used_elsewhere(graph: LayerGraph, block: _Block, after: _Block) -> bool:
    """Return whether another block than the next one takes a value of a block."""
    there = {*block.positions, *after.positions}
    return any(not graph.users(node) <= there for node in block.nodes)


class _Comparison:
    """Of two pairs of blocks, each one after the other, what the later ones do with the earlier
    ones.
    """

    def __init__(
        self, graph: LayerGraph, one: tuple[_Block, _Block], other: tuple[_Block, _Block]
    ) -> None:
        self._graph = graph
        self._own = one[1]
        self._after = other[1]
        self._alike = all(map(_are_alike, one, other))
        self._counterparts = dict[fx.Node, fx.Node]()
        for own, after in zip(one, other, strict=True):
            self._counterparts.update(zip(own.nodes, after.nodes, strict=False))

    def follows(self) -> bool:
        """Return whether the two do the same."""
        if not self._alike:
            return False
        pairs = zip(self._own.nodes, self._after.nodes, strict=True)
        return all(self._is_same_operation(one, other) for one, other in pairs)

    def _is_same_operation(self, one: fx.Node, other: fx.Node) -> bool:
        if one.target != other.target or not self._is_same_value(one, other):
            return False
        leaves, spec = tree_flatten((one.args, dict(one.kwargs)), is_leaf=_is_node)
        others, other_spec = tree_flatten((other.args, dict(other.kwargs)), is_leaf=_is_node)
        return spec == other_spec and all(map(self._is_same_argument, leaves, others))

    def _is_same_value(self, one: fx.Node, other: fx.Node) -> bool:
        spec, other_spec = (self._graph.specs.get(node) for node in (one, other))
        if spec is None or other_spec is None:
            return spec is other_spec
        return spec == replace(other_spec, name=spec.name)

    def _is_same_argument(self, one: Any, other: Any) -> bool:
        if not (_is_node(one) and _is_node(other)):
            return type(one) is type(other) and bool(one == other)
        if one in self._counterparts:
            return self._counterparts[one] is other
        if one is other:
            return True
        if one.op == other.op == "get_attr":
            return self._is_same_weight(one, other)
        numbers = (one.meta.get("val"), other.meta.get("val"))
        return all(map(is_symbolic, numbers)) and self._expression(one) == self._expression(other)

    def _is_same_weight(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether the two blocks read their own weights of the same name and kind."""
        name, tensor = self._weight(one)
        other_name, other_tensor = self._weight(other)
        if tensor is None or other_tensor is None:
            return False  # a constant of the forward

        own = self._own.prefix
        after = self._after.prefix
        if not (name.startswith(own) and other_name.startswith(after)):
            return False  # tied to the weight of another module
        return name.removeprefix(own) == other_name.removeprefix(after) and (
            _kind(tensor) == _kind(other_tensor)
        )

    def _weight(self, node: fx.Node) -> tuple[str, Tensor | None]:
        parameter = self._graph.names.parameter(node)
        if parameter is not None:
            return parameter, self._graph.model.get_parameter(parameter)
        buffer = self._graph.names.buffer(node)
        if buffer is not None:
            return buffer, self._graph.model.get_buffer(buffer)
        return "", None

    def _expression(self, node: fx.Node) -> object:
        return self._graph.reader.expression(node.meta["val"])


def _are_alike(one: _Block, other: _Block) -> bool:
    """Return whether two blocks have as many layers and operations."""
    layers = len(one.positions) == len(other.positions)
    return layers and len(one.nodes) == len(other.nodes)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, fx.Node)
