"""Leave out all but three of a model's equal blocks, whose costs one of them tells.

A transformer has dozens of equal blocks, and what a step of one costs, the steps of all cost. The first of them takes
what an embedding made, and what the last one makes goes elsewhere, so that these two stay as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.model.capture.size import is_symbolic
from planner.plan.blocks import BLOCK

_LEAST = 3  # equal blocks beside the first, of which one is left out

_Block = Sequence[GraphLayer]


@contextmanager
def abridged(graph: LayerGraph) -> Iterator[tuple[LayerGraph, list[int]]]:
    """Give a graph without blocks that equal the one before them, and for each layer the one that stands for it.

    The layers are positions in the shorter graph. While the context lasts, the operations after what is left out take
    the values of the block that stands for it, in the given graph, too.
    """
    kept = list(range(len(graph.layers)))
    stands = list(kept)
    undo: list[tuple[fx.Node, Any, Any]] = []
    users: dict[fx.Node, dict[fx.Node, None]] = {}
    if graph.blocks is None:
        for run in _runs_of_equal_blocks(graph):
            first, last = run[0], run[-1]
            for spared in run[1:-1]:
                stands[spared.start : spared.stop] = first
                kept = [position for position in kept if position not in spared]
            replaced = dict(zip(_nodes(graph, run[-2]), _nodes(graph, first), strict=True))
            users |= {node: dict(node.users) for pair in replaced.items() for node in pair}
            for node in _nodes(graph, last):
                if taken := [each for each in node.all_input_nodes if each in replaced]:
                    undo.append((node, node.args, node.kwargs))
                    for each in taken:
                        node.replace_input_with(each, replaced[each])
    place = {position: index for index, position in enumerate(kept)}
    try:
        shorter = graph if not undo else replace(graph, layers=tuple(graph.layers[position] for position in kept))
        yield shorter, [place[position] for position in stands]
    finally:
        for node, args, kwargs in undo:
            node.args, node.kwargs = args, kwargs
        for node, order in users.items():  # which decides in which order a profile lists its edges
            node.users.clear()
            node.users.update(order)


def _nodes(graph: LayerGraph, block: range) -> list[fx.Node]:
    return [node for position in block for node in graph.layers[position].nodes]


def _runs_of_equal_blocks(graph: LayerGraph) -> Iterator[list[range]]:
    """Yield runs of blocks, each equal to the one before it and used by itself and the next one alone."""
    compare = _Comparison(graph)
    blocks: list[range] = []
    start = 0
    for key, group in groupby(graph.layers, lambda layer: (match := BLOCK.match(layer.name)) and match[0]):
        block = range(start, start := start + len(list(group)))
        if key is not None and blocks and blocks[-1].stop == block.start and len(blocks[-1]) == len(block):
            blocks.append(block)
        else:
            yield from compare.runs(blocks)
            blocks = [block] if key is not None else []
    yield from compare.runs(blocks)


class _Comparison:
    """Tells whether two blocks of a graph cost the same."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._layers_of: dict[str, set[int]] = {}  # that use a weight or buffer
        for position, layer in enumerate(graph.layers):
            for name in (*layer.parameters, *layer.buffers):
                self._layers_of.setdefault(name, set()).add(position)
        self._tensors = dict(graph.model.named_parameters()) | dict(graph.model.named_buffers())

    def runs(self, blocks: Sequence[range]) -> Iterator[list[range]]:
        """Yield the runs among blocks that follow one another: those that allow to leave a block out."""
        run = list(blocks[1:2])
        for before, one, other in zip(blocks, blocks[1:], blocks[2:], strict=False):
            if self._equal(before, one, other):
                run.append(other)
                continue
            if len(run) >= _LEAST:
                yield run
            run = [other]
        if len(run) >= _LEAST:
            yield run

    def _equal(self, before: range, one: range, other: range) -> bool:
        """Return whether `other` does with `one`, the block before it, what that does with `before`."""
        graph = self._graph
        own, others = _nodes(graph, one), _nodes(graph, other)
        last = _nodes(graph, before)
        sizes = [[len(graph.layers[position].nodes) for position in block] for block in (before, one, other)]
        if sizes[1] != sizes[2]:
            return False
        pairs = dict(zip(own, others, strict=True))
        if sizes[0] == sizes[1]:
            pairs |= zip(last, own, strict=True)
        names: dict[str, str] = {}
        inside = {*one, *other}
        for node in own:
            if any(user in graph.owner and graph.owner[user] not in inside for user in node.users):
                return False
        return all(self._same(node, pairs[node], pairs, names, (one, other)) for node in own)

    def _same(
        self, x: fx.Node, y: fx.Node, pairs: dict[fx.Node, fx.Node], names: dict[str, str], blocks: tuple[range, range]
    ) -> bool:
        specs = [spec and replace(spec, name="") for spec in (self._graph.specs.get(x), self._graph.specs.get(y))]
        if x.target != y.target or specs[0] != specs[1] or (x in self._graph.written) != (y in self._graph.written):
            return False
        given = [
            tree_flatten((node.args, dict(node.kwargs)), is_leaf=lambda leaf: isinstance(leaf, fx.Node))
            for node in (x, y)
        ]
        if given[0][1] != given[1][1]:
            return False
        return all(
            self._stand_alike(a, b, pairs, names, blocks)
            if isinstance(a, fx.Node) and isinstance(b, fx.Node)
            else type(a) is type(b) and a == b
            for a, b in zip(given[0][0], given[1][0], strict=True)
        )

    def _stand_alike(
        self, x: fx.Node, y: fx.Node, pairs: dict[fx.Node, fx.Node], names: dict[str, str], blocks: tuple[range, range]
    ) -> bool:
        if x is y or pairs.get(x) is y:
            return True
        if x.op != "get_attr" or y.op != "get_attr":
            values = [node.meta.get("val") for node in (x, y)]
            if x in self._graph.owner or y in self._graph.owner or not all(map(is_symbolic, values)):
                return False
            read = [self._graph.reader.expression(value) for value in values]
            return read[0] is not None and read[0] == read[1]
        known = [self._graph.names.parameter(node) or self._graph.names.buffer(node) for node in (x, y)]
        a, b = known
        if a is None or b is None:
            return a is b and self._same_constant(x, y)
        if names.setdefault(a, b) != b:  # they are tied in one of the blocks alone
            return False
        alone = all(self._layers_of[name] <= set(block) for name, block in zip((a, b), blocks, strict=True))
        return a == b or (alone and _kind(self._tensors[a]) == _kind(self._tensors[b]))

    def _same_constant(self, x: fx.Node, y: fx.Node) -> bool:
        """Return whether two constants are alike: tensors in shape and dtype, nested graphs in every operation."""
        a, b = (self._graph.names.constant(node) for node in (x, y))
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return _kind(a) == _kind(b)
        return isinstance(a, fx.GraphModule) and isinstance(b, fx.GraphModule) and a.code == b.code


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad
