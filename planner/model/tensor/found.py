"""Find what ranks can divide in a captured model that does not say so itself.

A product whose outputs are divided (column) goes with a later one whose inputs are (row), if every operation between
them works on each part alone: pointwise operations, views that keep heads apart, attention by heads, products of
matrices per head. What does not end in such a product stays whole. Embeddings are divided by their vocabulary, unless a
product uses their weight, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import InputError
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec
from planner.model.tensor.plan import Plan, declared_plan

_aten = torch.ops.aten
_VIEWS = (_aten.view, _aten.reshape, _aten.unflatten, _aten.flatten, _aten._unsafe_view, _aten.unsqueeze, _aten.squeeze)
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
_ALONG = (_aten.softmax, _aten._softmax)  # those compute along the dimension that is their second argument


def tensor_parallel_plan(training_spec: TrainingSpec, graph: LayerGraph, degree: int) -> Plan:
    """Return how so many ranks divide a model's modules: as it says, or else as its graph allows.

    Raises:
        InputError: if it does not say so, and nothing is found.
    """
    if (declared := declared_plan(training_spec, graph.model)) is not None:
        return declared
    if found := found_plan(graph, degree):
        return found
    raise InputError(
        f"the model '{training_spec.name}' does not say how its layers are divided, and nothing was found that "
        f"{degree} ranks can divide",
        hint="write tensor_parallel_plan() into the model file, which returns patterns of module names and how each is "
        'divided, such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}; or leave out `tensor`',
    )


def found_plan(graph: LayerGraph, degree: int) -> dict[str, str]:
    """Return how so many ranks divide the modules of a captured model, as `tensor_parallel_plan()` would say it."""
    search = _Search(graph, degree)
    while not search.tried():
        pass  # what turned out not to end in a sum is whole from then on
    return search.plan()


class _Search:
    """Walks through the graph with every product divided by its outputs, but for those that were found to fail."""

    def __init__(self, graph: LayerGraph, degree: int) -> None:
        self._degree = degree
        self._nodes = [node for layer in graph.layers for node in layer.nodes]
        users: dict[str, list[fx.Node]] = {}
        names = {node: graph.names.parameter(node) for node in graph.module.graph.nodes}
        for node in self._nodes:
            for source in node.all_input_nodes:
                if (name := names.get(source)) is not None:
                    users.setdefault(name, []).append(node)
        # A weight that is used once, as the weight of a product or an embedding.
        self._weights: dict[fx.Node, str] = {}
        for name, (user, *others) in users.items():
            weight = _weight_of(user)
            if not others and name.endswith(".weight") and weight is not None and names.get(weight) == name:
                self._weights[user] = name
        self._shapes = {name: parameter.shape for name, parameter in graph.model.named_parameters()}
        self._whole: set[fx.Node] = set()  # products that are not divided
        self._rows: set[fx.Node] = set()
        self._columns: set[fx.Node] = set()

    def plan(self) -> dict[str, str]:
        """Return what the last walk has found."""
        found = {self._module(node): "colwise" for node in self._columns}
        found |= {self._module(node): "rowwise" for node in self._rows}
        for node, name in self._weights.items():
            if node.target is _aten.embedding.default and self._shapes[name][0] % self._degree == 0:
                found[self._module(node)] = "embedding_rowwise"
        return found

    def _module(self, node: fx.Node) -> str:
        return self._weights[node].rpartition(".")[0]

    def tried(self) -> bool:
        """Walk once; return whether nothing failed."""
        self._rows, self._columns = set(), set()
        divided: dict[fx.Node, tuple[int, frozenset[fx.Node]]] = {}  # dimension, and the products it comes from
        failed: set[fx.Node] = set()
        for node in self._nodes:
            inputs = [source for source in node.all_input_nodes if source in divided]
            sources = frozenset[fx.Node]().union(*(divided[source][1] for source in inputs))
            if node.target is _aten.linear.default and node in self._weights:
                if self._ends(node, inputs, divided):
                    self._rows.add(node)
                    continue
                failed |= sources
                if not sources and node not in self._whole and self._shapes[self._weights[node]][0] % self._degree == 0:
                    self._columns.add(node)
                    divided[node] = len(_shape(node)) - 1, frozenset([node])
            elif inputs:
                dimension = _dimension(node, {source: divided[source][0] for source in inputs})
                size = None if dimension is None else _shape(node)[dimension]
                if dimension is None or not isinstance(size, int) or size % self._degree:
                    failed |= sources
                else:
                    divided[node] = dimension, sources
        ends = {source for row in self._rows for source in divided[row.args[0]][1]}  # type: ignore[index]
        failed |= self._columns - ends
        self._whole |= failed
        return not failed

    def _ends(
        self, node: fx.Node, inputs: Sequence[fx.Node], divided: dict[fx.Node, tuple[int, frozenset[fx.Node]]]
    ) -> bool:
        """Return whether a product sums up over the last dimension of a divided value."""
        value = node.args[0]
        return (
            isinstance(value, fx.Node)
            and list(inputs) == [value]
            and divided[value][0] == len(_shape(value)) - 1
            and self._shapes[self._weights[node]][1] % self._degree == 0
        )


def _weight_of(node: fx.Node) -> fx.Node | None:
    """Return the weight of a linear product or an embedding."""
    place = {_aten.linear.default: 1, _aten.embedding.default: 0}.get(node.target)  # type: ignore[call-overload]
    weight = None if place is None else node.args[place]
    return weight if isinstance(weight, fx.Node) else None


def _shape(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _dimension(node: fx.Node, divided: dict[fx.Node, int]) -> int | None:
    """Return the dimension along which an operation's result is divided; None where it does not work on parts alone.

    Args:
        divided: those of the values that it reads.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or not _shape(node):
        return None
    operation, first = node.target.overloadpacket, node.args[0]
    if operation is _aten.scaled_dot_product_attention:
        heads = {len(_shape(source)) - 3 for source in divided}
        return heads.pop() if set(divided.values()) == heads and first in divided else None
    if operation in (_aten.matmul, _aten.bmm):
        dimension = divided[next(iter(divided))]
        batch = len(divided) == 2 and set(divided.values()) == {dimension} and dimension < len(_shape(node)) - 2
        return dimension if batch else None
    if operation is _aten.cat:
        dimensions = {divided.get(each) for each in node.all_input_nodes}
        dimension = divided[next(iter(divided))]
        along = node.args[1] if len(node.args) > 1 else 0
        return dimension if dimensions == {dimension} and _other(along, node, dimension) else None
    if not isinstance(first, fx.Node):
        return None
    if operation is _aten.slice and first in divided:
        return divided[first] if _other(node.args[1], node, divided[first]) else None
    if operation in _VIEWS and first in divided:
        return _viewed(_shape(first), _shape(node), divided[first])
    if operation in (_aten.transpose, _aten.permute) and first in divided:
        return _moved(node, len(_shape(first)), divided[first])
    if operation in _ALONG and first in divided:
        return divided[first] if _other(node.args[1], node, divided[first]) else None
    if operation in _SAME and first in divided:
        same = len(_shape(first)) == len(_shape(node)) and _shape(first)[divided[first]] == _shape(node)[divided[first]]
        return divided[first] if same else None
    return _pointwise(node, divided) if torch.Tag.pointwise in node.target.tags else None


def _other(along: Any, node: fx.Node, dimension: int) -> bool:
    """Return whether an operation computes along another dimension than the divided one."""
    return isinstance(along, int) and along % len(_shape(node)) != dimension


def _pointwise(node: fx.Node, divided: dict[fx.Node, int]) -> int | None:
    """Return the dimension of a result whose elements come from elements in the same place."""
    shape = _shape(node)
    found = {dimension - len(_shape(source)) for source, dimension in divided.items()}
    if len(found) > 1:
        return None
    place = found.pop()
    for source in node.all_input_nodes:
        others = _shape(source)
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
