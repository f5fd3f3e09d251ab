"""Leave out all but three of a model's equal blocks, whose costs one of them tells.

A transformer has dozens of equal blocks, and what a step of one costs, the steps of all cost. The
first of them takes what an embedding made, and what the last one makes goes elsewhere, so that
these two stay as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx

from planner.model.capture.graph import LayerGraph
from planner.model.capture.repeated import STANDS


@contextmanager
def abridged(graph: LayerGraph) -> Iterator[tuple[LayerGraph, list[int]]]:
    """Give a graph without the blocks that were not traced, and for each layer the one that stands
    for it.

    The layers are positions in the shorter graph. While the context lasts, the operations after
    what is left out take the values of the block that stands for it, in the given graph, too.
    """
    kept = list(range(len(graph.layers)))
    stands = list(kept)
    undo: list[tuple[fx.Node, Any, Any]] = []
    users: dict[fx.Node, dict[fx.Node, None]] = {}
    for path, count in graph.repeated.items():
        first, *spared, last = blocks = [
            _block(graph, f"{path}.{number}.") for number in range(STANDS, count)
        ]
        if len({(len(block), len(_nodes(graph, block))) for block in blocks}) > 1:
            continue  # an operation at its border joined a layer of another block
        for block in spared:
            stands[block.start : block.stop] = first
            kept = [position for position in kept if position not in block]
        replaced = dict(zip(_nodes(graph, spared[-1]), _nodes(graph, first), strict=True))
        users |= {node: dict(node.users) for pair in replaced.items() for node in pair}
        for node in _nodes(graph, last):
            if taken := [each for each in node.all_input_nodes if each in replaced]:
                undo.append((node, node.args, node.kwargs))
                for each in taken:
                    node.replace_input_with(each, replaced[each])
    place = {position: index for index, position in enumerate(kept)}
    try:
        shorter = (
            graph
            if not undo
            else replace(graph, layers=tuple(graph.layers[position] for position in kept))
        )
        yield shorter, [place[position] for position in stands]
    finally:
        for node, args, kwargs in undo:
            node.args, node.kwargs = args, kwargs
        for node, order in users.items():  # which decides in which order a profile lists its edges
            node.users.clear()
            node.users.update(order)


def _block(graph: LayerGraph, prefix: str) -> range:
    """Return the positions of a block's layers, which are behind each other."""
    own = [
        position
        for position, layer in enumerate(graph.layers)
        if f"{layer.name}.".startswith(prefix)
    ]
    return range(own[0], own[-1] + 1) if own else range(0)


def _nodes(graph: LayerGraph, block: range) -> list[fx.Node]:
    return [node for position in block for node in graph.layers[position].nodes]
