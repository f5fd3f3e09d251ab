"""How a model's modules are divided over ranks: as the model says, or as its captured graph allows.

A model file says so by `tensor_parallel_plan()`, models of transformers by their `tp_plan`, by patterns of names, as in
`{"model.layers.*.mlp.up_proj": "colwise"}`. A "colwise" product has a part of the outputs on each rank, and its ranks
sum up the gradients of its input; a "rowwise" one has a part of the inputs, and they sum up its outputs, as do those of
an embedding, each with a part of the vocabulary (Shoeybi et al., "Megatron-LM", 2019, section 3). What gathers its
output, and what is not named, is whole on every rank.

In a graph, a column product goes with a later row product if every operation between them works on each part alone:
pointwise operations, views that keep heads apart, attention by heads, products of matrices per head. Of a product that
makes query, key and value at once, each is divided. What does not end in a row product stays whole. Embeddings are
divided by their vocabulary, unless a product uses their weight, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from planner.errors import InputError
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec
from planner.model.tensor.dimensions import PRODUCTS, Cut, Packing, dimension_of, packing, shape_of, weight_of

Plan = Mapping[str, str]  # how modules are divided, by patterns of their names
COLUMNS, ROWS = ("colwise", "packed_colwise"), ("rowwise", "embedding_rowwise")


def declared_plan(training_spec: TrainingSpec, model: nn.Module) -> Plan | None:
    """Return how the model's modules are divided; None if neither the model file nor the model says so."""
    if training_spec.defines("tensor_parallel_plan"):
        return training_spec.tensor_parallel_plan()
    for name, module in model.named_modules():
        if plan := getattr(module, "tp_plan", None):
            return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}
    return None


def style_of(plan: Plan, name: str) -> str | None:
    """Return how a module is divided; a star in a pattern stands for a number."""
    general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    return plan.get(name, plan.get(general))


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
        names = {node: graph.names.parameter(node) for node in graph.module.graph.nodes}
        uses = Counter(names[source] for node in self._nodes for source in node.all_input_nodes)
        # A weight that is used once, as the weight of a product or an embedding.
        self._weights: dict[fx.Node, str] = {}
        for node in self._nodes:
            name = names.get(weight_of(node))
            if name is not None and uses[name] == 1 and name.endswith(".weight"):
                self._weights[node] = name
        self._shapes = {name: parameter.shape for name, parameter in graph.model.named_parameters()}
        self._packings: dict[fx.Node, Packing | None] = {
            node: packing(node) for node in self._weights if node.target in PRODUCTS
        }
        self._whole: set[fx.Node] = set()  # products that are not divided
        self._rows: set[fx.Node] = set()
        self._columns: set[fx.Node] = set()

    def plan(self) -> dict[str, str]:
        """Return what the last walk has found."""
        styles = dict.fromkeys(self._columns, "colwise") | dict.fromkeys(self._rows, "rowwise")
        for node, name in self._weights.items():
            if node.target is torch.ops.aten.embedding.default and self._shapes[name][0] % self._degree == 0:
                styles[node] = "embedding_rowwise"
        return {self._weights[node].rpartition(".")[0]: style for node, style in styles.items()}

    def tried(self) -> bool:
        """Walk once; return whether nothing failed."""
        self._rows, self._columns = set(), set()
        divided: dict[fx.Node, tuple[int, frozenset[fx.Node]]] = {}  # dimension, and the products it comes from
        opened: dict[fx.Node, int] = {}  # where what takes packed values apart has the divided dimension
        failed: set[fx.Node] = set()
        for node in self._nodes:
            inputs = [source for source in node.all_input_nodes if source in divided]
            sources = frozenset[fx.Node]().union(*(divided[source][1] for source in inputs))
            if node in self._packings:
                if self._ends(node, inputs, divided):
                    self._rows.add(node)
                    continue
                failed |= sources
                if not sources and node not in self._whole and self._divides(node):
                    self._columns.add(node)
                    divided[node] = len(shape_of(node)) - 1, frozenset([node])
                    packed = self._packings[node]
                    opened |= {} if packed is None else packed.opened
            elif inputs:
                dimension = opened.get(node, dimension_of(node, {source: divided[source][0] for source in inputs}))
                size = None if dimension is None else shape_of(node)[dimension]
                if dimension is None or not isinstance(size, int) or size % self._degree:
                    failed |= sources
                else:
                    divided[node] = dimension, sources
        ends = {source for row in self._rows for source in divided[_value_of(row)][1]}
        failed |= self._columns - ends
        self._whole |= failed
        return not failed

    def _divides(self, product: fx.Node) -> bool:
        """Return whether the ranks divide a product's outputs evenly, or each of the blocks that they are."""
        packed = self._packings[product]
        cut = Cut(PRODUCTS[product.target].outputs, () if packed is None else packed.blocks)
        return cut.divides(self._shapes[self._weights[product]][cut.dimension], self._degree)

    def _ends(
        self, node: fx.Node, inputs: Sequence[fx.Node], divided: dict[fx.Node, tuple[int, frozenset[fx.Node]]]
    ) -> bool:
        """Return whether a product sums up over the last dimension of a divided value, which is no packed one."""
        value = _value_of(node)
        return (
            list(inputs) == [value]
            and divided[value][0] == len(shape_of(value)) - 1
            and self._shapes[self._weights[node]][PRODUCTS[node.target].inputs] % self._degree == 0
        )


def _value_of(product: fx.Node) -> fx.Node:
    """Return the value that a product multiplies with its weight."""
    value = product.args[PRODUCTS[product.target].weight - 1]
    assert isinstance(value, fx.Node)
    return value
