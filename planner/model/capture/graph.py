"""LayerGraph: a captured training forward with its loss, as a chain of layers and the values
between them.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.errors import CaptureError
from planner.formats.files import replace
from planner.formats.profile import Cause, Edge
from planner.model.capture.operations import Names, writes
from planner.model.capture.regions import regions_of
from planner.model.capture.size import Extent, Size, SizeReader, evaluate, is_symbolic
from planner.model.lengths import Length
from planner.model.options import LossFunction, ModuleOptions
from planner.model.torch_private import OpOverload, TreeSpec, tree_flatten, tree_leaves, tree_map

LOSS = "loss"  # the key under which a stage returns the loss


@dataclass(frozen=True)
class ValueSpec:
    """A tensor that one layer makes and later layers use.

    Kernels sum in another order for other layouts, so a copy in another order changes the last
    digits downstream. An expanded element (of a mask, of key-value heads that several heads share)
    is sent once, and the receiver expands it.
    """

    name: str  # in the graph
    dtype: torch.dtype
    requires_grad: bool
    sizes: tuple[Size, ...]
    # dimensions from the outermost in memory to the innermost; (0, 1, ...) where contiguous
    order: tuple[int, ...]
    expanded: tuple[int, ...] = ()  # dimensions along which the memory holds one element for all

    @classmethod
    def of(cls, name: str, value: Tensor, sizes: Sequence[Size]) -> "ValueSpec":
        """Return the spec of a value like this one."""
        order = memory_order(value)
        expanded = expanded_dimensions(value)
        return cls(name, value.dtype, value.requires_grad, tuple(sizes), order, expanded)

    @property
    def of_gradient(self) -> "ValueSpec":
        """The same for the gradient, which differs along expanded dimensions."""
        return replace(self, expanded=())

    @cached_property
    def _in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def shape(self, extent: Extent) -> tuple[int, ...]:
        """Return the shape for a batch of this extent."""
        return tuple(evaluate(size, extent) for size in self.sizes)

    def wire_shape(self, extent: Extent) -> tuple[int, ...]:
        """Return the shape of what `to_wire` returns."""
        shape = self.shape(extent)
        # A microbatch without samples has nothing to repeat.
        return tuple(
            min(1, shape[each]) if each in self.expanded else shape[each] for each in self.order
        )

    def to_wire(self, value: Tensor) -> Tensor:
        """Return a view of `value` in its memory order, without repetition: what a message should
        copy.
        """
        for dimension in self.expanded:
            value = value.narrow(dimension, 0, min(1, value.shape[dimension]))
        if self._in_order:
            return value
        return value.permute(self.order)

    def from_wire(self, copy: Tensor, extent: Extent) -> Tensor:
        """Return the value, given a contiguous copy of what `to_wire` returned."""
        value = copy
        if not self._in_order:
            value = copy.permute(sorted(range(len(self.order)), key=self.order.__getitem__))
        if not self.expanded:
            return value
        return value.expand(self.shape(extent))

    def size_bytes(self, extent: Extent) -> int:
        """Return the bytes of a message for a batch of this extent."""
        return math.prod(self.wire_shape(extent)) * self.dtype.itemsize


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


@dataclass(frozen=True, eq=False)
class GraphLayer:
    """Consecutive operations that share a stage."""

    name: str  # unique; the module path where there is one
    op: str  # for people: "Conv2d", "aten.add"
    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]  # fully qualified names; the first one of a tied parameter
    buffers: tuple[str, ...]
    cause: Cause | None = None  # why its operations cannot be cut, where they are many of all


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_TENSOR = object()  # stands for a tensor among the leaves


@dataclass(frozen=True, eq=False)
class Structure:
    """What a block returns besides tensors: lists, tuples, dicts, numbers and strings, the same for
    every batch.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]

    def tensors(self, value: Any, block: str) -> list[Tensor]:
        """Return the tensors in `value`, which must have this structure."""
        found = structure_of(value)
        if found is None or found.spec != self.spec or found.leaves != self.leaves:
            raise CaptureError(
                f"block '{block}' returns another structure than on the example batch",
                hint="the number of tensors, and everything else, must be the same for every batch",
            )
        return tensors_of(value)

    def value(self, tensors: Sequence[Any]) -> Any:
        """Return what the next block takes, given the tensors in it."""
        rest = iter(tensors)
        return self.spec.unflatten(
            [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        )


def structure_of(value: Any) -> Structure | None:
    """Return the structure of what a block returned; None where something in it cannot be sent."""
    leaves, spec = tree_flatten(value)
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    return Structure(spec, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """Blocks that share a layer; the last layer computes the loss, perhaps without any block."""

    blocks: tuple[tuple[str, nn.Module], ...]  # with their names
    # of what the layer before returns; None for the first layer, which takes the batch
    takes: Structure | None
    # of what the layer after takes; None for the last layer, which computes the loss
    gives: Structure | None
    training: tuple[bool, ...]  # for each of `modules`, the mode that it is put into

    @property
    def modules(self) -> list[nn.Module]:
        """The blocks and all modules within them, each once."""
        return [*dict.fromkeys(module for _, block in self.blocks for module in block.modules())]


@dataclass(frozen=True)
class BlockChain:
    """The modules that a graph of blocks runs."""

    layers: tuple[BlockLayer, ...]
    loss: LossFunction | None


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in what a block returned."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """A model's training step up to the loss."""

    model: nn.Module  # the user's; its parameters are the stages' parameters
    module: fx.GraphModule  # the flat graph, with the constants and nested graphs it uses
    names: Names  # of parameters and buffers, by the nodes that read them
    reader: SizeReader  # of the graph's symbolic numbers
    layers: tuple[GraphLayer, ...]  # in execution order
    specs: dict[fx.Node, ValueSpec]  # of every node whose value is a tensor that can be sent
    inputs: tuple[fx.Node, ...]  # leaves of the batch, in the order of `Batch.flatten`
    batch_spec: TreeSpec
    outputs: tuple[Any, ...]  # leaves of the model's output, nodes in place of tensors
    output_spec: TreeSpec
    loss: fx.Node
    tied_parameters: tuple[tuple[str, ...], ...]  # groups of names of one and the same parameter
    # the only one that the graph is valid for; None when it is valid for any
    batch_size: int | None
    options: ModuleOptions
    # inputs, and nodes that read buffers and constants, whose memory the forward writes
    written: frozenset[fx.Node]
    hash: str = ""  # see `graph_digest`
    blocks: BlockChain | None = None  # to run instead of the graph's operations
    lengths: tuple[Length, ...] = ()  # of the batch, that vary
    # leaves of the batch that are part of the graph
    constants: Mapping[int, Any] = field(default_factory=dict)
    pinned_at: str | None = None  # the user's line that fixes `batch_size`, where one does
    # operations on constants alone: each piece of code runs those it needs
    fixed: frozenset[fx.Node] = frozenset()

    @cached_property
    def values(self) -> dict[str, ValueSpec]:
        """The values that cross from a layer to a later one, by name, in execution order."""
        return {node.name: self.specs[node] for node in self.crossing}

    @cached_property
    def position(self) -> dict[str, int]:
        return {layer.name: index for index, layer in enumerate(self.layers)}

    @cached_property
    def owner(self) -> dict[fx.Node, int]:
        """Index of the layer of each operation."""
        return {node: index for index, layer in enumerate(self.layers) for node in layer.nodes}

    def last_use(self, node: fx.Node) -> int:
        """Return the index of the last layer that uses `node`; of its own layer when no later one
        does.
        """
        return max(
            (self.owner[user] for user in node.users if user in self.owner),
            default=self.owner[node],
        )

    def users(self, node: fx.Node) -> set[int]:
        """Return the indices of the layers that use `node`."""
        return {self.owner[user] for user in node.users if user in self.owner}

    @cached_property
    def crossing(self) -> tuple[fx.Node, ...]:
        """Operations whose result a later layer receives, in execution order."""
        return tuple(
            node
            for node, index in self.owner.items()
            if self.last_use(node) > index and node not in self.fixed
        )

    @cached_property
    def needs(self) -> tuple[set[int], ...]:
        """Of each layer, the indices of the layers whose results it takes."""
        needs: tuple[set[int], ...] = tuple(set() for _ in self.layers)
        for node in self.crossing:
            for user in self.users(node) - {self.owner[node]}:
                needs[user].add(self.owner[node])
        return needs

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The uses of values by later layers, each once, ordered by the source."""
        uses: dict[tuple[int, str, int], None] = {}
        for node in self.crossing:
            made = self.owner[node]
            for user in node.users:
                used = self.owner.get(user, made)
                if used != made:
                    uses[made, node.name, used] = None

        names = [layer.name for layer in self.layers]
        return tuple(
            Edge(source=names[made], value=value, target=names[used])
            for made, value, used in sorted(uses, key=lambda use: use[0])
        )

    def read_by(self, layers: Sequence[GraphLayer]) -> tuple[fx.Node, ...]:
        """Return every node that the code of layers reads, in it or before it."""
        used = dict.fromkeys(
            source for layer in layers for node in layer.nodes for source in node.all_input_nodes
        )
        waiting = [node for node in used if node in self.fixed]
        while waiting:
            new = [source for source in waiting.pop().all_input_nodes if source not in used]
            used |= dict.fromkeys(new)
            waiting += [source for source in new if source in self.fixed]

        return tuple(used)

    @cached_property
    def loss_path(self) -> frozenset[fx.Node]:
        """Operations from which the loss is computed."""
        path = {self.loss}
        for node in reversed(self.module.graph.nodes):  # users come after what they use
            if node in path:
                path.update(node.all_input_nodes)
        return frozenset(path)

    @cached_property
    def gradient_path(self) -> frozenset[fx.Node]:
        """Operations and weights that get a gradient from the loss, as far as the graph tells."""
        path: set[fx.Node] = set()
        for node in reversed(self.module.graph.nodes):  # users come after what they use
            spec = self.specs.get(node)
            if spec is not None and not spec.requires_grad:
                continue
            # What an operation writes into may be read by a node that does not name it.
            is_end = node is self.loss or writes(node, self.module)
            if is_end or not path.isdisjoint(node.users):
                path.add(node)
        return frozenset(path)

    @cached_property
    def off_loss(self) -> frozenset[str]:
        """Names of values and weights with a graph that the loss does not go back to; none of
        blocks, whose operations are not known.
        """
        if self.blocks is not None:
            return frozenset()
        path = self.gradient_path
        crossing = (node for node in self.crossing if self.specs[node].requires_grad)
        values = (node.name for node in crossing if node not in path)
        read = {node: self.names.parameter(node) for node in self.module.graph.nodes}
        reached = {name for node, name in read.items() if node in path}
        weights = (name for name in read.values() if name is not None and name not in reached)
        return frozenset([*values, *weights])

    def names_of(self, parameters: Sequence[str]) -> tuple[str, ...]:
        """Return `parameters` with all other names of the tied ones among them."""
        groups = {name: group for group in self.tied_parameters for name in group}
        return tuple(
            dict.fromkeys(alias for name in parameters for alias in groups.get(name, (name,)))
        )


def graph_digest(graph: LayerGraph, specs: Mapping[fx.Node, ValueSpec]) -> str:
    """Return the SHA-256 of operations, arguments, shapes, dtypes (of `specs`, on a CPU), parameter
    names and layers.

    It says whether a plan was made for this model. It does not depend on the process, the device
    or, unless the model pins it, the batch size.
    """
    lines = [
        *_weight_lines(graph.model),
        *(f"tied {group}" for group in graph.tied_parameters),
        *_option_lines(graph),
        *(f"layer {layer.name} {[node.name for node in layer.nodes]}" for layer in graph.layers),
        *(_operation_line(graph, node, specs.get(node)) for node in graph.module.graph.nodes),
    ]
    return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


def _weight_lines(model: nn.Module) -> Iterator[str]:
    for name, tensor in model.named_parameters(remove_duplicate=False):
        yield f"parameter {name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"


def _option_lines(graph: LayerGraph) -> Iterator[str]:
    """Yield the options that are set: the hashes of graphs without them stay as they were."""
    options = graph.options
    if options.autocast is not None:
        yield f"autocast {options.autocast}"
    if options.channels_last:
        yield "channels-last"
    if options.half is not None:
        yield "master weights"
    if graph.lengths:
        yield f"lengths {[(each.least, each.most) for each in graph.lengths]}"


def _operation_line(graph: LayerGraph, node: fx.Node, spec: ValueSpec | None) -> str:
    line = f"{node.op} {node.name} {_target(graph, node)} {_arguments(graph, node)}"
    if spec is not None:
        sizes = [str(size) for size in spec.sizes]
        line += f" {spec.dtype} {spec.requires_grad} {sizes} {spec.order}"
        if spec.expanded:
            line += f" {spec.expanded}"
    return line + "".join(f" in {region}" for region in regions_of(node))


def _target(graph: LayerGraph, node: fx.Node) -> str:
    if node.op != "get_attr":
        return str(getattr(node.target, "__name__", "")) + ":" + _plain(node.target)
    name = graph.names.parameter(node) or graph.names.buffer(node)
    if name is not None:
        return name
    constant = graph.names.constant(node)
    if isinstance(constant, Tensor):
        return f"{constant.dtype} {constant.tolist()}"
    assert isinstance(constant, fx.GraphModule)
    return " ".join(
        f"{inner.op} {_plain(inner.target)} {_arguments(graph, inner)}"
        for inner in constant.graph.nodes
    )


def _plain(target: Any) -> str:
    # The default text of a function contains its address, which differs between processes.
    if isinstance(target, (str, OpOverload)):
        return str(target)
    return type(target).__name__


def _arguments(graph: LayerGraph, node: fx.Node) -> str:
    def text(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
            expression = None
            if is_symbolic(value):
                expression = graph.reader.expression(value)
            return f"%{leaf.name if expression is None else expression}"

        if isinstance(leaf, torch.device):
            return "device"
        return repr(leaf)

    is_leaf = lambda x: isinstance(x, fx.Node)  # noqa: E731
    return repr(tree_map(text, (node.args, dict(node.kwargs)), is_leaf=is_leaf))
