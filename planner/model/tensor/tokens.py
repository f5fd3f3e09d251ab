"""Sequence parallelism: which values the ranks of a group divide by tokens between the products that they divide.

The sum behind a row product is scattered over the tokens, and the tokens are gathered before the next column product
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2).
"""

from collections.abc import Mapping

import sympy
import torch
from torch import Tensor, fx

from planner.model.capture.graph import LayerGraph
from planner.model.capture.operations import is_random
from planner.model.capture.size import BATCH
from planner.model.tensor.dimensions import RESHAPES, Cut, dimension_of, packet_of, shape_of, sums, weight_of


def divided_by_tokens(graph: LayerGraph, weights: Mapping[fx.Node, Cut], degree: int) -> dict[fx.Node, int]:
    """Return the values of a graph that so many ranks divide by tokens, each with the dimension of its tokens.

    The walk begins behind products whose results the ranks sum up. It goes on through operations that work on each
    token alone; others get the whole value.
    """
    found = dict[fx.Node, int]()
    for node in graph.module.graph.nodes:
        cut = weights.get(weight_of(node))
        if cut is not None and sums(node, cut):
            start = node
            while (
                len(shape_of(start)) == 2 and len(start.users) == 1 and packet_of(next(iter(start.users))) in RESHAPES
            ):
                start = next(iter(start.users))  # samples and tokens are one dimension before that
            if possible := _divisible(graph, start, degree):
                found[start] = min(possible, key=lambda dimension: (dimension == 0, dimension))
            continue
        divided = {source: found[source] for source in node.all_input_nodes if source in found}
        if cut is not None or not divided or node in found:
            continue
        if packet_of(node) is not torch.ops.aten.dropout and is_random(node, graph.module):
            continue
        dimension = dimension_of(node, divided | _alike(node, divided))
        if dimension is not None and (not _is_tensor(node) or dimension in _divisible(graph, node, degree)):
            found[node] = dimension
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _divisible(graph: LayerGraph, node: fx.Node, degree: int) -> list[int]:
    """Return the dimensions that ranks divide evenly for a batch of any size; the last one is the features'."""
    sizes = graph.reader.sizes(node.meta["val"]) or ()
    counts = [size if isinstance(size, int) else size / BATCH for size in sizes[:-1]]
    return [dimension for dimension, count in enumerate(counts) if (sympy.sympify(count) / degree).is_Integer]


def _alike(node: fx.Node, divided: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the whole values among an operation's arguments of which each rank takes its tokens alone."""
    source, dimension = next(iter(divided.items()))
    size, place = shape_of(source)[dimension], dimension - len(shape_of(source))
    others = {other: shape_of(other) for other in node.all_input_nodes if other not in divided}
    return {
        other: place + len(shape)
        for other, shape in others.items()
        if len(shape) >= -place and str(shape[place]) == str(size)
    }
