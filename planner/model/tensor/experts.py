"""Expert parallelism: the grouped products of a mixture of experts, whose experts the ranks of a
group divide.

Tokens are sorted by their expert, and a grouped product multiplies each expert's rows with its own
matrix. A rank has the matrices of its experts. There are two ways to get it the rows that chose
them:

- Each rank has a part of the samples, and the whole of all other weights. The ranks exchange rows
  by an all-to-all before the products and by one behind them, and twice again in the backward
  (Lepikhin et al., "GShard", 2021, section 3.1); and they all-reduce the gradients of what they
  have alike.
- All ranks have all tokens, as between divided products of other layers. Each takes the rows of its
  experts, and they sum up what they make of them.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from planner.model.capture.graph import LayerGraph
from planner.model.capture.operations import is_random
from planner.model.tensor.dimensions import COPIES, dimension_of, packet_of, shape_of
from planner.model.torch_private import OpOverload

_aten = torch.ops.aten
# The last is what transformers captures where the first is not there.
GROUPED = ("_grouped_mm", "grouped_mm_fallback")
EXPERTS = "grouped_gemm"  # how plans of transformers call a weight whose experts are divided
_VIEWS = (_aten.transpose, _aten.permute)


@dataclass(frozen=True)
class Experts:
    """What ranks compute of a graph's grouped products."""

    # Values of which a rank has its experts' rows, each with the value that tells where the rows of
    # each expert end.
    rows: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    # experts, by name of the divided weights
    counts: Mapping[str, int] = field(default_factory=dict)


def find_experts(graph: LayerGraph, divided: Container[str] | None = None) -> Experts:
    """Return which values of a graph have rows of experts, if ranks divide these weights: all that
    they can, for None.

    A weight can be divided if nothing but grouped products uses it.
    """
    counts = dict[str, int]()
    products = dict[fx.Node, fx.Node]()
    for node in graph.module.graph.nodes:
        name = graph.names.parameter(node)
        if name is None or (divided is not None and name not in divided):
            continue
        own = _products(node)
        if own:
            products |= own
            offsets = next(iter(own.values()))
            counts[name] = int(shape_of(offsets)[0])

    return Experts(_rows(graph, products), counts)


def _rows(graph: LayerGraph, products: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the values that have a row for each of the experts' rows, from grouped products on,
    with the offsets of these.
    """
    rows = dict[fx.Node, fx.Node]()
    if not products:
        return rows

    for node in graph.module.graph.nodes:
        known = {source: rows[source] for source in node.all_input_nodes if source in rows}
        offsets = set(known.values())
        if node in products:
            rows[node] = products[node]
        elif len(offsets) == 1 and _keeps_rows(graph, node, known):
            rows[node] = offsets.pop()

    return rows


def _products(weight: fx.Node) -> dict[fx.Node, fx.Node]:
    """Return the grouped products that use a weight or views of it, with offsets; nothing if
    anything else does.
    """
    found = dict[fx.Node, fx.Node]()
    for user in weight.users:
        if (offsets := offsets_of(user)) is not None and user.args[1] is weight:
            found[user] = offsets
        elif packet_of(user) in (*_VIEWS, *COPIES) and (own := _products(user)):
            found |= own
        else:
            return {}

    return found


def offsets_of(node: fx.Node) -> fx.Node | None:
    """Return what tells a grouped product of rows where those of each expert end; None for other
    operations.
    """
    if getattr(packet_of(node), "__name__", "") not in GROUPED:
        return None
    rows, matrices, *rest = node.args
    given = rest[0] if rest else node.kwargs.get("offs")
    dimensions = [len(shape_of(each)) for each in (rows, matrices) if isinstance(each, fx.Node)]
    if dimensions == [2, 3] and isinstance(given, fx.Node):
        return given
    return None


def _keeps_rows(graph: LayerGraph, node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> bool:
    """Return whether an operation makes each row of one row of these values, and needs nothing else
    that has rows.
    """
    is_mutable = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    if is_random(node, graph.module) or (is_mutable and node.args[0] not in known):
        return False
    return dimension_of(node, dict.fromkeys(known, 0)) == 0
