"""Sequence parallelism: which values the ranks of a group divide by tokens between the products
that they divide.

The sum behind a row product is scattered over the tokens, and the tokens are gathered before the
next column product (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022, section 4.2.2).
"""

from collections.abc import Mapping

import sympy
from torch import fx

from planner.model.capture.graph import LayerGraph
from planner.model.capture.size import BATCH
from planner.model.tensor.dimensions import (
    RESHAPES,
    Cut,
    dimension_of,
    is_tensor,
    packet_of,
    shape_of,
    sums,
    weight_of,
)


def divided_by_tokens(
    graph: LayerGraph, weights: Mapping[fx.Node, Cut], degree: int
) -> dict[fx.Node, int]:
    """Return the values of a graph that so many ranks divide by tokens, each with the dimension of
    its tokens.

    The walk begins behind products whose results the ranks sum up. It goes on through operations
    that work on each token alone; others get the whole value.
    """
    found = dict[fx.Node, int]()
    for node in graph.module.graph.nodes:
        cut = weights.get(weight_of(node))
        sources = [source for source in node.all_input_nodes if source in found]
        if cut is not None and sums(node, cut):
            start = node
            while len(shape_of(start)) == 2 and [
                packet_of(user) in RESHAPES for user in start.users
            ] == [True]:
                start = next(iter(start.users))  # samples and tokens are one dimension before that
            if possible := _divisible(graph, start, degree):
                found[start] = possible[-1]
        elif cut is None and sources and node not in found:
            dimension = dimension_of(
                node, {source: found[source] for source in sources}, parts=True
            )
            if dimension is not None and (
                not is_tensor(node) or dimension in _divisible(graph, node, degree)
            ):
                found[node] = dimension

    return found


def _divisible(graph: LayerGraph, node: fx.Node, degree: int) -> list[int]:
    """Return the dimensions that ranks divide evenly for a batch of any size; the last one is the
    features'.
    """
    sizes = graph.reader.sizes(node.meta["val"]) or ()
    counts = [size if isinstance(size, int) else size / BATCH for size in sizes[:-1]]
    return [
        dimension
        for dimension, count in enumerate(counts)
        if (sympy.sympify(count) / degree).is_Integer
    ]
