"""Why operations share a layer, where so many do that a model cannot be divided well."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, fx

from planner.formats.profile import Cause
from planner.model.capture.operations import Names
from planner.model.torch_private import HigherOrderOperator

LEAST_RUNS = 4  # layers that one would have been
LEAST_SHARE = 0.25  # of all operations

_COPY_HINT = (
    "write it where it is first read, and let later layers use a copy, as in self.{name}.clone()"
)
_BUFFER_HINT = "write it where it is first read, and let later layers use a copy of it"
_INPUT_HINT = "write into a copy: x = x.clone()"
_IN_PLACE_HINT = "leave out the in-place operation, as in x = x + y for x += y"
_SIZE_HINT = "pad the value to a size that does not depend on the data"
_NESTED_HINT = "write it without torch.cond and loops of torch, or as several of them"


@dataclass(frozen=True)
class Span:
    """The operations from layer `first` to layer `last`, between which nothing can be cut."""

    first: int
    last: int
    cause: Cause | None = None  # None for the loss, behind which nothing is cut


def written(names: Names, reader: fx.Node | None) -> Cause:
    """Return the cause of a span that a write makes; `reader` reads the memory, if it outlives the
    forward.
    """
    if reader is None:
        return Cause(
            reason="an operation writes, in place, a value that is made before them",
            hint=_IN_PLACE_HINT,
        )

    if reader.op == "placeholder":
        return Cause(
            reason="they use an input of the model, which forward writes", hint=_INPUT_HINT
        )

    buffer = names.buffer(reader)
    if buffer is None:
        return Cause(reason="they use a constant, which forward writes", hint=_BUFFER_HINT)
    hint = _COPY_HINT.format(name=buffer.rpartition(".")[2])
    return Cause(reason=f"they use buffer '{buffer}', which forward writes", hint=hint)


def unsent(node: fx.Node) -> Cause:
    """Return the cause of a span from a value that cannot be sent to the last operation that uses
    it.
    """
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.layout == torch.strided:
        reason = f"they use value '{node.name}', whose size depends on the data"
        return Cause(reason=reason, hint=_SIZE_HINT)
    reason = f"they use value '{node.name}', which cannot be sent to another stage"
    return Cause(reason=reason, hint="let forward make dense tensors only")


def causes_of_joins(sizes: Sequence[int], spans: Sequence[Span]) -> dict[int, Cause]:
    """Return why layers are joined, by the first of them, where these have many of all operations.

    `sizes` are the operations of each layer as it would be without spans.
    """
    ends: dict[int, int] = {}  # by the first layer of each run of layers that spans join
    reached = -1
    start = 0
    for span in sorted(spans, key=lambda span: span.first):
        if span.first > reached:
            start = span.first
        reached = max(reached, span.last)
        ends[start] = reached

    found = {}
    for first, last in ends.items():
        inside = [span for span in spans if first <= span.first <= last and span.cause is not None]
        widest = max(inside, key=lambda span: span.last - span.first, default=None)
        many = sum(sizes[first : last + 1]) >= LEAST_SHARE * sum(sizes)
        if widest is not None and many and widest.last - widest.first + 1 >= LEAST_RUNS:
            assert widest.cause is not None
            found[first] = widest.cause

    return found


def operations_in(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> int:
    """Count operations, those of branches and loops included."""
    return sum(1 + _nested_operations(module, node) for node in nodes)


def cause_of_nesting(
    module: fx.GraphModule, nodes: Sequence[fx.Node], all_nodes: Sequence[fx.Node]
) -> Cause | None:
    """Return why a layer cannot be cut that runs many operations as one, as a branch or a loop
    does.
    """
    nested = max(nodes, key=lambda node: _nested_operations(module, node))
    inside = _nested_operations(module, nested)
    if inside < LEAST_RUNS or inside < LEAST_SHARE * operations_in(module, all_nodes):
        return None
    return Cause(
        reason=f"they are in one operation, '{nested.name}', a branch or a loop", hint=_NESTED_HINT
    )


def _nested_operations(module: fx.GraphModule, node: fx.Node) -> int:
    if not isinstance(node.target, HigherOrderOperator):
        return 0
    read = [
        attrgetter(str(each.target))(module)
        for each in node.all_input_nodes
        if each.op == "get_attr"
    ]
    graphs = [each for each in read if isinstance(each, fx.GraphModule)]
    calls = [
        (graph, each)
        for graph in graphs
        for each in graph.graph.nodes
        if each.op == "call_function"
    ]
    return sum(1 + _nested_operations(graph, each) for graph, each in calls)
