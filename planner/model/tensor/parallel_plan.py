"""How a model's modules are divided over ranks: as the model says, or as its captured graph allows.

Ranks sum up the gradients of a "colwise" product's input, and the outputs of a "rowwise" one and of
an embedding (Shoeybi et al., "Megatron-LM", 2019, section 3). In a graph, a column product goes
with a later row product if every operation between them works on each part alone. What does not end
in a row product stays whole.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from planner.errors import InputError
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec
from planner.model.tensor.dimensions import (
    PRODUCTS,
    Cut,
    Packing,
    dimension_of,
    packing,
    shape_of,
    weight_of,
)
from planner.model.tensor.experts import EXPERTS, find_experts

Plan = Mapping[str, str]  # how modules are divided, by patterns of their names
COLUMNS = ("colwise", "packed_colwise")
ROWS = ("rowwise", "embedding_rowwise")
# columns, whose outputs every rank has whole right behind
GATHERED = ("colwise_gather_output", "colwise_rep")


def _models_own_plan(model: nn.Module) -> Plan | None:
    for name, module in model.named_modules():
        if plan := getattr(module, "tp_plan", None):
            return {
                f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()
            }
    return None


def style_of(plan: Plan, name: str) -> str | None:
    """Return how a module is divided; a star in a pattern stands for a number."""
    general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    return plan.get(name, plan.get(general))


def tensor_parallel_plan(
    training_spec: TrainingSpec, graph: LayerGraph, degree: int, samples: int = 0
) -> Plan:
    """Return how so many ranks divide a model's modules: as it says, or else as its graph allows.

    Of a model with experts they divide these alone, where each rank can have a part of a
    microbatch's `samples`.
    """
    if training_spec.defines("tensor_parallel_plan"):
        return training_spec.tensor_parallel_plan()
    if divides_samples(graph, degree, samples) and (experts := expert_plan(graph, degree)):
        return experts
    if (declared := _models_own_plan(graph.model)) is not None:
        return {**declared, **expert_plan(graph, degree)}
    if found := found_plan(graph, degree):
        return found
    raise InputError(
        f"the model '{training_spec.name}' does not say how its layers are sharded, and nothing "
        f"was found that "
        f"{degree} ranks can shard",
        hint="write tensor_parallel_plan() into the model file, as "
        "docs/guides/tensor-parallelism.md shows, or leave "
        "out `tensor`",
    )


def found_plan(graph: LayerGraph, degree: int) -> dict[str, str]:
    """Return how so many ranks divide the modules of a captured model, as `tensor_parallel_plan()`
    would say it.
    """
    nodes = [node for layer in graph.layers for node in layer.nodes]
    weights = _weights_read(graph, nodes)
    read_once = {node: weight.name for node, weight in weights.items() if weight.uses == 1}
    styles = _product_styles(nodes, degree, graph.model, read_once)

    for node, weight in weights.items():
        if _divides_rows(node, graph.model.get_parameter(weight.name), degree):
            style = _embedding_style(weight)
            if style is not None:
                styles[weight.name] = style

    modules = {name.rpartition(".")[0]: style for name, style in styles.items()}
    return modules | expert_plan(graph, degree)


@dataclass(frozen=True)
class _Weight:
    """The weight of a product or of an embedding."""

    name: str
    uses: int  # by any operation
    readers: Sequence[fx.Node]  # products and embeddings


def _weights_read(graph: LayerGraph, nodes: Sequence[fx.Node]) -> dict[fx.Node, _Weight]:
    """Return the weight of each product and embedding, if a module names it `weight`."""
    names = {node: graph.names.parameter(node) for node in graph.module.graph.nodes}
    uses = Counter(names[source] for node in nodes for source in node.all_input_nodes)

    readers: dict[str, list[fx.Node]] = {}
    for node in nodes:
        name = names.get(weight_of(node))
        if name is not None and name.endswith(".weight"):
            readers.setdefault(name, []).append(node)

    return {node: _Weight(name, uses[name], own) for name, own in readers.items() for node in own}


def _embedding_style(weight: _Weight) -> str | None:
    """Return how the rows of an embedding's weight are divided; None where others use it, too.

    A head may have the embedding's weight.
    """
    if weight.uses > 2 or weight.uses != len(weight.readers):
        return None
    if any(reader.target in PRODUCTS for reader in weight.readers):
        return GATHERED[0]
    return "embedding_rowwise"


def _divides_rows(node: fx.Node, weight: Tensor, degree: int) -> bool:
    """Return whether a node is an embedding whose rows so many ranks can shard."""
    return node.target is torch.ops.aten.embedding.default and weight.shape[0] % degree == 0


def _product_styles(
    nodes: Sequence[fx.Node], degree: int, model: nn.Module, weights: Mapping[fx.Node, str]
) -> dict[str, str]:
    """Return how the weights of products are divided, by their names; `weights` are those of nodes
    that may be.
    """
    shapes = {node: model.get_parameter(name).shape for node, name in weights.items()}
    packings = {node: packing(node) for node in weights if node.target in PRODUCTS}
    whole = set[fx.Node]()  # products that turned out not to end in a sum
    while True:
        columns, rows, failed = _walk(nodes, degree, shapes, packings, whole)
        if not failed:
            break
        whole |= failed

    by_columns = {weights[node]: "colwise" for node in columns}
    return by_columns | {weights[node]: "rowwise" for node in rows}


def divides_samples(graph: LayerGraph, degree: int, samples: int) -> bool:
    """Return whether so many ranks can have a part of the samples each."""
    return samples > 0 and samples % degree == 0 and graph.batch_size is None


def expert_plan(graph: LayerGraph, degree: int) -> dict[str, str]:
    """Return which weights of grouped products so many ranks divide by experts, by the names of the
    weights.
    """
    return {
        name: EXPERTS for name, count in find_experts(graph).counts.items() if count % degree == 0
    }


def _walk(
    nodes: Sequence[fx.Node],
    degree: int,
    shapes: Mapping[fx.Node, torch.Size],
    packings: Mapping[fx.Node, Packing | None],
    whole: set[fx.Node],
) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """Walk through the graph with every product divided by its outputs, but for those that are
    whole.

    `shapes` are of weights. The products returned are those divided by outputs, those by inputs,
    and those that fail.
    """
    rows = set[fx.Node]()
    columns = set[fx.Node]()
    failed = set[fx.Node]()
    ended = set[fx.Node]()
    # dimension, and the products it comes from
    divided: dict[fx.Node, tuple[int, frozenset[fx.Node]]] = {}
    # where what takes packed values apart has the divided dimension
    opened: dict[fx.Node, int] = {}

    for node in nodes:
        dimensions = {
            source: divided[source][0] for source in node.all_input_nodes if source in divided
        }
        sources = frozenset[fx.Node]().union(*(divided[source][1] for source in dimensions))
        if node in packings:
            product = PRODUCTS[node.target]
            value = node.args[product.weight - 1]
            # It sums up over the last dimension of a divided value.
            is_last = any(
                source is value and dimension == len(shape_of(source)) - 1
                for source, dimension in dimensions.items()
            )
            if is_last and len(dimensions) == 1 and shapes[node][product.inputs] % degree == 0:
                rows.add(node)
                ended |= sources
                continue

            failed |= sources
            packed = packings[node]
            cut = Cut(product.outputs, () if packed is None else packed.blocks)
            divides = cut.divides(shapes[node][cut.dimension], degree)
            if divides and not sources and node not in whole:
                columns.add(node)
                divided[node] = len(shape_of(node)) - 1, frozenset([node])
                opened |= {} if packed is None else packed.opened

        elif dimensions:
            dimension = opened.get(node, dimension_of(node, dimensions))
            size = None
            if dimension is not None:
                size = shape_of(node)[dimension]
            if dimension is None or not isinstance(size, int) or size % degree:
                failed |= sources
            else:
                divided[node] = dimension, sources

    return columns, rows, failed | (columns - ended)
