"""LayerGraph: a captured training forward with its loss, as a chain of layers and the values between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec

from planner.model.capture.names import Names
from planner.model.capture.size import Size, SizeReader, evaluate
from planner.model.options import ModuleOptions

if TYPE_CHECKING:
    from planner.model.capture.block_layers import BlockChain

LOSS = "loss"  # the key under which a stage returns the loss


@dataclass(frozen=True)
class ValueSpec:
    """A tensor that one layer makes and later layers use.

    Attributes:
        name: in the graph.
        dtype: element type.
        requires_grad: whether a gradient returns.
        sizes: of the dimensions.
        order: dimensions from the outermost in memory to the innermost; (0, 1, ...) where it is contiguous. Kernels
            sum in another order for other layouts, so a copy in another order changes the last digits downstream.
        expanded: dimensions along which the memory holds one element for all (a mask, key-value heads that several
            heads share). Such an element is sent once, and the receiver expands it.
    """

    name: str
    dtype: torch.dtype
    requires_grad: bool
    sizes: tuple[Size, ...]
    order: tuple[int, ...]
    expanded: tuple[int, ...] = ()

    @property
    def of_gradient(self) -> ValueSpec:
        """The same for the gradient, which differs along expanded dimensions."""
        return replace(self, expanded=())

    @cached_property
    def _in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape for a batch of `batch_size` samples."""
        return tuple(evaluate(size, batch_size) for size in self.sizes)

    def wire_shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape of what `to_wire` returns."""
        shape = self.shape(batch_size)
        return tuple(1 if dimension in self.expanded else shape[dimension] for dimension in self.order)

    def to_wire(self, value: Tensor) -> Tensor:
        """Return a view of `value` in its memory order, without repetition: what a message should copy."""
        for dimension in self.expanded:
            value = value.narrow(dimension, 0, 1)
        return value if self._in_order else value.permute(self.order)

    def from_wire(self, copy: Tensor, batch_size: int) -> Tensor:
        """Return the value, given a contiguous copy of what `to_wire` returned."""
        value = copy if self._in_order else copy.permute(sorted(range(len(self.order)), key=self.order.__getitem__))
        return value.expand(self.shape(batch_size)) if self.expanded else value

    def size_bytes(self, batch_size: int) -> int:
        """Return the bytes of a message for a batch of `batch_size` samples."""
        return math.prod(self.wire_shape(batch_size)) * self.dtype.itemsize


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of `tensor` from the outermost in memory to the innermost."""
    # Sizes of one can have any stride, and expanded dimensions have none: both stay in place.
    strides: tuple[int, ...] = tuple(tensor.stride())
    moved = [d for d, size in enumerate(tensor.shape) if size > 1 and strides[d] > 0]
    outermost_first = iter(sorted(moved, key=lambda d: (-strides[d], d)))
    return tuple(next(outermost_first) if d in moved else d for d in range(tensor.dim()))


def expanded_dimensions(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions along which the memory holds one element for all."""
    return tuple(d for d, size in enumerate(tensor.shape) if size > 1 and tensor.stride(d) == 0)


@dataclass(frozen=True)
class Input:
    """A leaf of the batch; `spec` is None where it is no tensor."""

    node: fx.Node
    spec: ValueSpec | None


@dataclass(frozen=True, eq=False)
class GraphLayer:
    """Consecutive operations that share a stage."""

    name: str  # unique; the module path where there is one
    op: str  # for people: "Conv2d", "aten.add"
    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]  # fully qualified names; the first one of a tied parameter
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class ValueEdge:
    """The use of a value of layer `source` by layer `target`."""

    source: str
    value: str
    target: str


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """A model's training step up to the loss.

    Attributes:
        model: the user's; its parameters are the stages' parameters.
        module: the flat graph, with the constants and nested graphs it uses.
        names: of parameters and buffers, by the nodes that read them.
        reader: of the graph's symbolic numbers.
        layers: in execution order.
        specs: of every node whose value is a tensor that can be sent.
        inputs: leaves of the batch, in the order of `Batch.flatten`.
        batch_spec: structure of the batch.
        outputs: leaves of the model's output, nodes in place of tensors.
        output_spec: structure of the output.
        loss: the node that computes the loss.
        tied_parameters: groups of names of one and the same parameter.
        batch_size: the only one that the graph is valid for; None when it is valid for any.
        options: how its stages run.
        hash: of operations, arguments, shapes and parameter names; the same in every process and for every batch size.
        blocks: modules to run instead of the graph's operations, for a model whose file names its blocks.
    """

    model: nn.Module
    module: fx.GraphModule
    names: Names
    reader: SizeReader
    layers: tuple[GraphLayer, ...]
    specs: dict[fx.Node, ValueSpec]
    inputs: tuple[Input, ...]
    batch_spec: TreeSpec
    outputs: tuple[Any, ...]
    output_spec: TreeSpec
    loss: fx.Node
    tied_parameters: tuple[tuple[str, ...], ...]
    batch_size: int | None
    options: ModuleOptions
    hash: str = ""
    blocks: BlockChain | None = None

    @cached_property
    def values(self) -> dict[str, ValueSpec]:
        """The values that cross from a layer to a later one, by name, in execution order."""
        return {node.name: self.specs[node] for node in self.crossing}

    @cached_property
    def position(self) -> dict[str, int]:
        """Index of each layer by name."""
        return {layer.name: index for index, layer in enumerate(self.layers)}

    @cached_property
    def owner(self) -> dict[fx.Node, int]:
        """Index of the layer of each operation."""
        return {node: index for index, layer in enumerate(self.layers) for node in layer.nodes}

    def last_use(self, node: fx.Node) -> int:
        """Return the index of the last layer that uses `node`; of its own layer when no later one does."""
        return max((self.owner[user] for user in node.users if user in self.owner), default=self.owner[node])

    @cached_property
    def crossing(self) -> tuple[fx.Node, ...]:
        """Operations whose result a later layer uses, in execution order."""
        return tuple(node for node, index in self.owner.items() if self.last_use(node) > index)

    @cached_property
    def edges(self) -> tuple[ValueEdge, ...]:
        """The uses of values by later layers, each once, ordered by the source."""
        edges: dict[ValueEdge, None] = {}
        for node in self.crossing:
            source = self.owner[node]
            for user in node.users:
                target = self.owner.get(user, source)
                if target != source:
                    edges[ValueEdge(self.layers[source].name, node.name, self.layers[target].name)] = None
        return tuple(sorted(edges, key=lambda edge: self.position[edge.source]))

    @cached_property
    def loss_path(self) -> frozenset[fx.Node]:
        """Operations from which the loss is computed."""
        path: set[fx.Node] = set()
        pending = [self.loss]
        while pending:
            node = pending.pop()
            if node not in path:
                path.add(node)
                pending += node.all_input_nodes
        return frozenset(path)

    def names_of(self, parameters: Sequence[str]) -> tuple[str, ...]:
        """Return `parameters` with all other names of the tied ones among them."""
        groups = {name: group for group in self.tied_parameters for name in group}
        return tuple(dict.fromkeys(alias for name in parameters for alias in groups.get(name, (name,))))
