"""Adds to a stage's code where values become DTensors, and where they are whole on every rank again."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from planner.model.capture.graph import LayerGraph
from planner.model.capture.operations import is_random
from planner.model.tensor.dimensions import (
    PARTS,
    PRODUCTS,
    VIEWS,
    Cut,
    Packing,
    packet_of,
    packing,
    shape_of,
    start_of,
    weight_of,
)
from planner.model.tensor.division import DividedWeights, sums_up

if TYPE_CHECKING:
    from planner.model.tensor.group import TensorGroup

_aten = torch.ops.aten


class Regions:
    """The operations of a piece of code whose results are DTensors; there are none without a group.

    They begin with products whose weights are divided, and end with those whose results the ranks sum up; what leaves
    the piece is whole, too. Operations that DTensor cannot divide run whole on every rank.

    Args:
        graph: that the code is a part of.
        code: gets further nodes.
    """

    def __init__(self, graph: LayerGraph, division: DividedWeights, code: fx.Graph) -> None:
        self._graph, self._division, self._code = graph, division, code
        self._weights: dict[fx.Node, Cut] = {}
        self._packed: dict[fx.Node, Cut] = {}
        self._opened: dict[fx.Node, Packing] = {}
        self._replaced: dict[Any, Callable[..., Tensor]] = {}
        self._inside: set[fx.Node] = set()
        self._entered: dict[fx.Node, fx.Node] = {}
        self._left: dict[fx.Node, fx.Node] = {}
        if division.group is not None:
            names = {node: graph.names.parameter(node) or "" for node in graph.module.graph.nodes}
            self._weights = {node: division.cuts[name] for node, name in names.items() if name in division.cuts}
            for node in graph.module.graph.nodes:
                cut = self._weights.get(weight_of(node)) if node.target in PRODUCTS else None
                packed = packing(node) if cut is not None and cut.blocks else None
                if packed is not None:
                    self._packed |= {value: Cut(each, packed.blocks) for value, each in packed.packed.items()}
                    self._opened |= dict.fromkeys(packed.opened, packed)
            self._replaced = {
                _aten.dropout.default: division.group.dropout,
                _aten.scaled_dot_product_attention.default: division.group.attention,
            }

    def reader(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node]:
        """Return what an operation reads in place of the values that it read in the graph.

        Args:
            copies: of these values in the code.
        """
        if not self._touches(node):
            return copies.__getitem__
        return lambda source: (self.whole if self._runs_whole(node) else self._within)(source, copies)

    def result(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return the result of an operation, given its copy that `reader` has served."""
        if not self._touches(node) or self._runs_whole(node):
            return copy
        copy.target = self._replaced.get(node.target, copy.target)
        if node in self._opened:
            self._take_apart(node, copy)
        if sums_up(node, self._weights):
            return self._code.call_function(self._group.leave, (copy,))
        if _is_tensor(node) or isinstance(node.meta.get("val"), (tuple, list)):
            self._inside.add(node)
        return copy

    def whole(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a value as it is on every rank."""
        if node in self._weights:
            copy = self._within(node, copies)
        elif node in self._inside and _is_tensor(node):
            copy = copies[node]
        else:
            return copies[node]
        if node not in self._left:
            cut = self._packed.get(node, self._weights.get(node, Cut(0)))
            self._left[node] = self._code.call_function(self._group.leave, (copy, cut.dimension, cut.blocks))
        return self._left[node]

    def _take_apart(self, node: fx.Node, copy: fx.Node) -> None:
        """Change an operation on a packed value so that it takes apart what each rank has of it."""
        packing, (value, *given) = self._opened[node], copy.args
        source = node.all_input_nodes[0]
        dimension, blocks = self._packed[source].dimension, packing.blocks
        if packet_of(node) in VIEWS:
            with self._code.inserting_before(copy):
                value = self._code.call_function(self._group.stack, (value, len(blocks), dimension))
            if packet_of(node) is _aten.unflatten:
                given = [dimension + 1, given[1][1:]]  # type: ignore[index]
            copy.args = (value, *given)
        elif packet_of(node) in PARTS:
            copy.target, copy.args, copy.kwargs = self._group.split, (value, blocks, dimension), {}
        else:
            start, length = start_of(node) % shape_of(source)[dimension], shape_of(node)[dimension]
            copy.target, copy.args, copy.kwargs = self._group.narrow, (value, start, length, dimension), {}

    @property
    def _group(self) -> TensorGroup:
        assert self._division.group is not None  # or nothing is divided
        return self._division.group

    def _touches(self, node: fx.Node) -> bool:
        """Return whether an operation reads a weight, or a value, of which each rank has a part."""
        return any(source in self._weights or source in self._inside for source in node.all_input_nodes)

    def _runs_whole(self, node: fx.Node) -> bool:
        """Return whether each rank runs an operation on whole values: nested graphs, and random numbers."""
        if node.target in self._replaced or node.target is getitem:
            return False
        return not isinstance(node.target, torch._ops.OpOverload) or is_random(node, self._graph.module)

    def _within(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a value as operations on divided ones take it."""
        if node in self._inside or not _is_tensor(node):
            return copies[node]
        if node not in self._entered:
            copy = copies[node]
            self._entered[node] = (
                self._code.call_function(self._group.part, (copy, self._weights[node].dimension))
                if node in self._weights
                else self._code.call_function(self._group.enter, (copy,))
            )
        return self._entered[node]


def _is_tensor(node: fx.Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor)
