"""Expert parallelism: the grouped products of a mixture of experts, whose experts the ranks of a group divide.

Tokens are sorted by their expert, and a grouped product multiplies each expert's rows with its own matrix. A rank has
the matrices of its experts, takes the rows that chose them, and the ranks sum up what their experts add to each token:
one all-reduce of the tokens forward and one backward, as behind a row product. Every rank routes all tokens alike. So
do the expert plans of transformers, which divide experts and not tokens (Rajbhandari et al., "DeepSpeed-MoE", 2022,
section 5, exchange tokens by two all-to-alls instead).
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from planner.model.capture.graph import LayerGraph
from planner.model.capture.operations import is_random
from planner.model.tensor.dimensions import COPIES, RESHAPES, dimension_of, is_tensor, packet_of, shape_of

_aten = torch.ops.aten
# The last is what transformers captures where the first is not there.
GROUPED = ("_grouped_mm", "grouped_mm_fallback")
EXPERTS = "grouped_gemm"  # how plans of transformers call a weight whose experts are divided
_VIEWS = (_aten.transpose, _aten.permute)
_LINEAR = (*RESHAPES, *COPIES, *_VIEWS, _aten.sum, _aten.mean)


class Routing(NamedTuple):
    """Which rows of a value belong to which expert."""

    offsets: fx.Node  # where the rows of each expert end
    experts: int


@dataclass(frozen=True)
class Experts:
    """What ranks compute of a graph's grouped products."""

    rows: Mapping[fx.Node, Routing] = field(default_factory=dict)  # values of which a rank has its experts' rows
    sums: Mapping[fx.Node, bool] = field(default_factory=dict)  # summands behind them; whether the ranks add them here
    counts: Mapping[str, int] = field(default_factory=dict)  # experts, by name of the divided weights


def find_experts(graph: LayerGraph, divided: Container[str] | None = None) -> Experts:
    """Return which values of a graph have rows of experts, if ranks divide these weights: all that they can, for None.

    A weight can be divided if nothing but grouped products uses it.
    """
    nodes: list[fx.Node] = list(graph.module.graph.nodes)
    counts, products = dict[str, int](), dict[fx.Node, Routing]()
    for node in nodes:
        name = graph.names.parameter(node)
        if name is not None and (divided is None or name in divided) and (own := _products(node)):
            products |= own
            counts[name] = next(iter(own.values())).experts
    rows = dict[fx.Node, Routing]()
    for node in nodes:
        known = {source: rows[source] for source in node.all_input_nodes if source in rows}
        if node in products:
            rows[node] = products[node]
        elif len(set(known.values())) == 1 and not is_random(node, graph.module):
            writes_another = writes(node) and node.args[0] not in known
            if not writes_another and dimension_of(node, dict.fromkeys(known, 0), parts=True) == 0:
                rows[node] = next(iter(known.values()))
    for node in reversed(nodes):  # what only these rows read, such as the tokens in the order of their experts
        if node.users and node not in rows and all(_reads_rows(user, node, rows) for user in node.users):
            is_taken = packet_of(node) is _aten.index and len(_indices(node)) == 1
            if is_taken or (packet_of(node) in COPIES and len(shape_of(node)) > 1):
                rows[node] = rows[next(iter(node.users))]
    return Experts(rows, _sums(nodes, rows), counts)


def _products(weight: fx.Node) -> dict[fx.Node, Routing]:
    """Return the grouped products of rows that use a weight, or views of it; nothing if anything else does."""
    found = dict[fx.Node, Routing]()
    for user in weight.users:
        if (offsets := offsets_of(user)) is not None and user.args[1] is weight:
            found[user] = Routing(offsets, int(shape_of(offsets)[0]))
        elif packet_of(user) in (*_VIEWS, *COPIES) and (own := _products(user)):
            found |= own
        else:
            return {}
    return found


def offsets_of(node: fx.Node) -> fx.Node | None:
    """Return what tells a grouped product of rows where those of each expert end; None for other operations."""
    if getattr(packet_of(node), "__name__", "") not in GROUPED:
        return None
    rows, matrices, *rest = node.args
    given = rest[0] if rest else node.kwargs.get("offs")
    dimensions = [len(shape_of(each)) for each in (rows, matrices) if isinstance(each, fx.Node)]
    return given if dimensions == [2, 3] and isinstance(given, fx.Node) else None


def _reads_rows(user: fx.Node, node: fx.Node, rows: Mapping[fx.Node, Routing]) -> bool:
    return user in rows and (offsets_of(user) is None or user.args[0] is node)


def writes(node: fx.Node) -> bool:
    """Return whether an operation changes a value in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _indices(node: fx.Node) -> list[Any]:
    return list(node.args[1])  # type: ignore[arg-type]


def _sums(nodes: Iterable[fx.Node], rows: Mapping[fx.Node, Routing]) -> dict[fx.Node, bool]:
    """Return the summands behind experts' rows, up to where something is not linear in them."""
    found = dict[fx.Node, bool]()
    for node in nodes:
        read = [source for source in node.all_input_nodes if source in rows]
        if node in rows or len(read) != 1 or not _is_linear_in(read[0], node):
            continue
        value: fx.Node | None = node
        while value is not None:
            after = next((user for user in value.users if _is_linear_in(value, user)), None)
            found[value] = after is None
            value = after
    return found


def _is_linear_in(value: fx.Node, node: fx.Node) -> bool:
    """Return whether only this operation reads a value, and takes sums to the sums of what it makes of summands."""
    if len(value.users) > 1 or not node.args or node.args[0] is not value or not is_tensor(node):
        return False
    takes = packet_of(node) is _aten.index and value not in _indices(node)
    return takes or packet_of(node) in _LINEAR
