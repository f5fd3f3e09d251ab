"""The model's output as the last stage sees it: of one microbatch, of some of its samples, or of
several together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.capture.operations import scope_of
from planner.model.capture.size import BATCH
from planner.model.torch_private import TreeSpec


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the output: a tensor by its name in the graph, or what is no tensor."""

    name: str | None
    value: Any = None
    divides: bool = True  # whether samples are entries of one dimension, or it is the same for all
    dimension: int | None = None  # of the samples
    same_for_all: bool = False  # as weights are


@dataclass(frozen=True)
class WholeOutput:
    """How the output is assembled, without the graph: a node leads to the whole model's weights."""

    leaves: tuple[OutputLeaf, ...]
    structure: TreeSpec
    inputs: tuple[str, ...]  # names of the batch's leaves

    @classmethod
    def of(cls, graph: LayerGraph) -> WholeOutput | None:
        """Return the output of a graph; None where there is none apart from the loss, which may
        write to it.
        """
        if graph.blocks is not None and graph.blocks.layers[-1].blocks:
            return None
        nodes = {leaf for leaf in graph.outputs if isinstance(leaf, fx.Node)}
        if not nodes or any(node not in graph.specs for node in nodes) or _is_written(graph, nodes):
            return None
        leaves = tuple(_leaf(graph, leaf) for leaf in graph.outputs)
        return cls(leaves, graph.output_spec, tuple(leaf.name for leaf in graph.inputs))

    @property
    def divides(self) -> bool:
        """Whether the output of several microbatches can be put together."""
        return all(leaf.divides for leaf in self.leaves)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values that the last stage has to return for it."""
        names = (leaf.name for leaf in self.leaves if leaf.name is not None)
        return tuple(name for name in dict.fromkeys(names) if name not in self.inputs)

    def tensors(self, known: Mapping[str, Tensor], batch: Batch) -> list[Any]:
        """Return the leaves of the output of a batch; NaN stands for what no layer of the stage
        has.
        """
        values = dict(zip(self.inputs, batch.flatten()[0], strict=True)) | dict(known)
        unknown = torch.tensor(float("nan"))
        return [
            leaf.value if leaf.name is None else values.get(leaf.name, unknown)
            for leaf in self.leaves
        ]

    def rows(self, leaves: Sequence[Any], samples: range) -> list[Any]:
        """Return what the output has of some samples."""
        chosen = []
        for leaf, value in zip(self.leaves, leaves, strict=True):
            if leaf.dimension is not None and isinstance(value, Tensor) and value.dim():
                value = value.narrow(leaf.dimension, samples.start, len(samples))
            chosen.append(value)
        return chosen

    def joined(self, parts: Sequence[Sequence[Any]]) -> list[Any] | None:
        """Return the output of several batches together; None where their leaves do not fit."""
        joined = []
        for leaf, values in zip(self.leaves, zip(*parts, strict=True), strict=True):
            value = _joined(leaf, values)
            if value is None and leaf.name is not None:
                return None
            joined.append(value)
        return joined

    def assembled(self, leaves: Sequence[Any]) -> Any:
        """Return the output as the model returns it."""
        return self.structure.unflatten(list(leaves))


def _joined(leaf: OutputLeaf, values: Sequence[Any]) -> Any:
    first = values[0]
    if leaf.name is None or leaf.same_for_all or not isinstance(first, Tensor):
        return first
    if leaf.dimension is not None and first.dim():
        shapes = {
            (*value.shape[: leaf.dimension], *value.shape[leaf.dimension + 1 :]) for value in values
        }
        if len(shapes) != 1:
            return None
        return torch.cat(list(values), leaf.dimension)

    return first  # it stands for what no layer of the stage has


def _leaf(graph: LayerGraph, leaf: Any) -> OutputLeaf:
    """Return what is known of a leaf of the output: a node, or a value that is no tensor."""
    if not isinstance(leaf, fx.Node):
        return OutputLeaf(None, leaf)
    spec = graph.specs[leaf]

    # A size may be computed from the number of samples, such as samples times words.
    others = [size for size in spec.sizes if isinstance(size, sympy.Basic) and size != BATCH]
    mixed = any(BATCH in size.free_symbols for size in others)

    dimensions = _dimensions_of_samples(spec, graph.batch_size)
    if not dimensions:
        same_for_all = _depends_on_weights_alone(leaf)
        return OutputLeaf(leaf.name, None, same_for_all and not mixed, None, same_for_all)

    divides = len(dimensions) == 1 and not mixed
    return OutputLeaf(leaf.name, None, divides, dimensions[0], False)


def _depends_on_weights_alone(node: fx.Node) -> bool:
    """Return whether no input leads to a value."""
    seen = {node}
    waiting = [node]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in seen]
        seen.update(new)
        waiting += new
    return not any(source.op == "placeholder" for source in seen)


def _dimensions_of_samples(spec: ValueSpec, fixed: int | None) -> list[int]:
    """Return the dimensions with one entry for each sample; of a graph for one batch size the first
    may be.
    """
    if fixed is not None:
        if spec.sizes and spec.sizes[0] == fixed:
            return [0]
        return []
    return [place for place, size in enumerate(spec.sizes) if size == BATCH]


def _is_written(graph: LayerGraph, outputs: set[fx.Node]) -> bool:
    """Return whether the loss may write to the memory of the output, which would then be
    another.
    """
    memory = {_origin(node) for node in outputs}
    for node in graph.module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if (
            node.op != "call_function"
            or scope_of(node) is not None
            or schema is None
            or not schema.is_mutable
        ):
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, fx.Node) and _origin(value) in memory:
                return True

    return False


def _origin(node: fx.Node) -> fx.Node:
    """Return the operation that made the memory of which a value is a view."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(
            returned.alias_info is not None for returned in schema.returns
        ):
            break
        node = node.args[0]
    return node
