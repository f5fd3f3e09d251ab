"""Find operations on constants alone, such as those that make a causal mask.

A mask has as many bytes as an activation where samples are long. So each piece of code that needs
one makes it, and no stage receives it.
"""

from collections.abc import Sequence, Set

from torch import Tensor, fx

from planner.model.capture.fake import TensorFacts
from planner.model.capture.graph import LayerGraph
from planner.model.capture.operations import is_random
from planner.model.capture.regions import regions_of


def fixed_operations(
    graph: LayerGraph, operations: Sequence[fx.Node], facts: TensorFacts
) -> frozenset[fx.Node]:
    """Return the operations on constants alone, of layers that do more.

    A layer of nothing else stays one: the layers after it would not follow it otherwise.
    """
    repeatable = _repeatable(graph, operations, facts)
    fixed = _on_constants(graph, operations, repeatable)

    whole_layers = [layer.nodes for layer in graph.layers if fixed.issuperset(layer.nodes)]
    kept = {node for nodes in whole_layers for node in nodes}
    return frozenset(_on_constants(graph, operations, repeatable - kept))


def _repeatable(
    graph: LayerGraph, operations: Sequence[fx.Node], facts: TensorFacts
) -> set[fx.Node]:
    """Return the operations that may run in several pieces of code, with the same result in
    each.
    """
    outputs = {leaf for leaf in graph.outputs if isinstance(leaf, fx.Node)}
    written = {storage for storages in facts.writes.values() for storage in storages}

    def is_repeatable(node: fx.Node) -> bool:
        touches_written = facts.writes[node] or facts.storages[node] & written
        # A piece of code that runs it may be in another region.
        is_elsewhere = node in outputs or regions_of(node)
        return not (touches_written or is_elsewhere or is_random(node, graph.module))

    return {node for node in operations if is_repeatable(node)}


def _on_constants(
    graph: LayerGraph, operations: Sequence[fx.Node], among: Set[fx.Node]
) -> set[fx.Node]:
    """Return those among operations that take nothing but constants and what such operations
    make.
    """
    fixed = set[fx.Node]()
    for node in operations:
        takes_constants = all(
            source in fixed or _is_constant(graph, source) for source in node.all_input_nodes
        )
        if node in among and takes_constants:
            fixed.add(node)
    return fixed


def _is_constant(graph: LayerGraph, node: fx.Node) -> bool:
    """Return whether a node reads a tensor that the forward made while it was traced, or is a
    number.
    """
    if node.op != "get_attr":
        return node.op == "call_function" and node not in graph.owner
    if graph.names.parameter(node) or graph.names.buffer(node) or node in graph.written:
        return False
    return isinstance(graph.names.constant(node), Tensor)
