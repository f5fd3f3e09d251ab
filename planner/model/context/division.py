"""How a stage's code computes with this rank's tokens, and what it exchanges with other stages."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from planner.errors import PlanError
from planner.formats.files import replace
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.capture.regions import regions_of
from planner.model.context.group import SequenceGroup
from planner.model.context.tokens import (
    ATTENTION,
    CROSS_ENTROPY,
    WHOLE_SEQUENCES,
    Step,
    token_steps,
    tokens_of,
)
from planner.model.options import gradient_hooks
from planner.model.tensor.dimensions import packet_of
from planner.model.tensor.division import Copies, DividedWeights

_aten = torch.ops.aten
# which take sizes as their second argument
_SIZED = (_aten.view, _aten.reshape, _aten._unsafe_view, _aten.expand)


@dataclass(frozen=True)
class DividedSequences(DividedWeights):
    """The ranks that divide the sequences of a stage's microbatches, and none of its weights.

    Attributes:
        sequences: the group of ranks.
        sequence_tokens: of a sequence, on all ranks.
        steps: how the operations of a stage's graph run with parts of the tokens.
    """

    sequences: SequenceGroup | None = None
    sequence_tokens: int = 0
    steps: Mapping[fx.Node, Step] = field(default_factory=dict)

    def within(self, graph: LayerGraph, borders: Collection[fx.Node]) -> "DividedSequences":
        """Return the same for a stage that exchanges these values with others."""
        assert self.sequences is not None
        steps = token_steps(graph, self.sequences.degree)
        tokens = {
            node: step.dimension for node, step in steps.items() if step.dimension is not None
        }
        return replace(self, steps=steps, tokens=tokens, borders=borders)

    def exchanged(self, node: fx.Node, spec: ValueSpec) -> ValueSpec:
        """Return the spec of what stages exchange of a value."""
        assert self.sequences is not None
        dimension = self.tokens.get(node)
        if dimension is None or not self.sends_parts:
            return spec
        sizes = list(spec.sizes)
        part = sympy.sympify(sizes[dimension]) / self.sequences.degree
        sizes[dimension] = int(part) if part.is_Integer else part
        return replace(spec, sizes=tuple(sizes))

    def writer(self, graph: LayerGraph, code: fx.Graph) -> "SequenceRegions":
        """Return what writes the code of a piece of a stage."""
        return SequenceRegions(graph, self, code)


def divided_sequences(graph: LayerGraph, group: SequenceGroup) -> DividedSequences:
    """Return how the ranks divide the sequences of a captured model.

    Raises:
        PlanError: where they cannot.
    """
    if graph.blocks is not None:
        raise PlanError(
            "ranks shard the sequences of a captured graph, and the model file names blocks, "
            "which run as they are",
            hint=f"leave out blocks(), or {WHOLE_SEQUENCES}",
        )

    for name, parameter in graph.model.named_parameters():
        if gradient_hooks(parameter):
            raise PlanError(
                f"parameter '{name}' has a hook on its gradient, which would see what one of the "
                f"ranks that shard sequences adds to it",
                hint=f"leave out the hook, or {WHOLE_SEQUENCES}",
            )

    tokens = tokens_of(graph, group.degree)
    token_steps(graph, group.degree)
    return DividedSequences(group=group, sequences=group, sequence_tokens=tokens, sends_parts=True)


class SequenceRegions:
    """The operations of a piece of code that read this rank's tokens.

    Values of which a rank has a part are ordinary tensors, also between the pieces of a stage. At
    the borders of the stage they are parts, too, or whole where stages exchange no parts.
    """

    def __init__(self, graph: LayerGraph, division: DividedSequences, code: fx.Graph) -> None:
        assert division.sequences is not None
        self._graph = graph
        self._code = code
        self._division = division
        self._group = division.sequences
        self._tokens = division.sequence_tokens
        self._steps = division.steps
        self._dimensions = division.tokens
        # a value is made whole, or cut, once in each region: one without gradients serves no other
        self._calls: dict[tuple[Any, ...], fx.Node] = {}

    def taken(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return a value that enters the piece."""
        if not self._crosses_whole(node):
            return copy
        return self._call(self._group.own_tokens, copy, self._dimensions[node])

    def made(self, node: fx.Node, copies: Copies) -> fx.Node:
        """Return a value as it leaves the piece."""
        if self._crosses_whole(node):
            return self._whole(node, (), copies)
        if node is self._graph.loss:
            return self._code.call_function(
                self._group.counted_once, (self._whole(node, (), copies),)
            )
        return copies[node]

    def reader(self, node: fx.Node, copies: Copies) -> Callable[[fx.Node], fx.Node]:
        """Return what an operation reads in place of the values that it read in the graph."""
        return partial(self._read, node, copies=copies)

    def result(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """Return the result of an operation, given its copy that `reader` has served."""
        step = self._steps.get(node)
        if step is None:
            return copy
        if node.target is ATTENTION:
            copy.target = self._group.sequence_attention
        elif node.target is CROSS_ENTROPY:
            copy.target = self._group.sequence_cross_entropy
            (dimension,) = step.parts.values()
            copy.kwargs = {**copy.kwargs, "dimension": dimension, "tokens": self._tokens}
        elif node.target is _aten.dropout.default:
            copy.target = self._group.sequence_dropout
            copy.kwargs = {**copy.kwargs, "dimension": step.dimension, "tokens": self._tokens}
        elif step.dimension is not None:
            self._take_sizes_of_parts(node, copy, step.dimension)

        return copy

    def _read(self, node: fx.Node, source: fx.Node, copies: Copies) -> fx.Node:
        step = self._steps.get(node)
        region = regions_of(node)
        if step is None or source not in step.parts:
            return self._whole(source, region, copies)
        if source in self._dimensions:
            return copies[source]
        dimension = step.parts[source]
        key = "part", source, dimension, region
        if key not in self._calls:
            self._calls[key] = self._call(self._group.own_tokens, copies[source], dimension)
        return self._calls[key]

    def _whole(self, source: fx.Node, region: Any, copies: Copies) -> fx.Node:
        """Return a value as it is in one process."""
        if source not in self._dimensions:
            return copies[source]
        key = "whole", source, region
        if key not in self._calls:
            dimension = self._dimensions[source]
            self._calls[key] = self._call(self._group.all_tokens, copies[source], dimension)
        return self._calls[key]

    def _call(self, function: Callable[..., object], copy: fx.Node, dimension: int) -> fx.Node:
        return self._code.call_function(function, (copy, dimension, self._tokens))

    def _crosses_whole(self, node: fx.Node) -> bool:
        """Return whether stages exchange all tokens of a value that ranks have parts of."""
        division = self._division
        return node in self._dimensions and node in division.borders and not division.sends_parts

    def _take_sizes_of_parts(self, node: fx.Node, copy: fx.Node, dimension: int) -> None:
        """Change the sizes that an operation gives its result to those of a part."""
        if node.target in (_aten.view.default, _aten._unsafe_view.default):
            # a part may be laid out in another way than the whole, of which this is a view
            copy.target = torch.reshape

        place = None
        if packet_of(node) in _SIZED:
            place = 1
            first = 0
        elif packet_of(node) is _aten.unflatten:
            place = 2
            before = self._graph.reader.sizes(node.args[0].meta["val"])  # type: ignore[union-attr]
            first = int(node.args[1]) % len(before or ())  # type: ignore[arg-type]

        if place is None or not isinstance(copy.args[place], (list, tuple)):
            return
        sizes = list(copy.args[place])  # type: ignore[arg-type]
        at = dimension - first
        if not 0 <= at < len(sizes) or sizes[at] == -1:
            return
        with self._code.inserting_before(copy):
            sizes[at] = self._divided_size(sizes[at])
        copy.args = (*copy.args[:place], sizes, *copy.args[place + 1 :])

    def _divided_size(self, size: Any) -> Any:
        degree = self._group.degree
        if isinstance(size, fx.Node):
            return self._code.call_function(_divided_number, (size, degree))
        return size // degree


def _divided_number(size: int, degree: int) -> int:
    return size // degree
