"""Generate the code of a stage: the operations of its layers, or calls of the blocks that the
model's file names.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.model.capture.failure import user_place
from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.model.capture.operations import enters_autocast, is_random, movable, moved
from planner.model.capture.regions import RegionWriter, regions_of, restored_after_failure
from planner.model.capture.size import is_symbolic
from planner.model.loss import loss_of
from planner.model.modes import set_modes
from planner.model.randomness import reseed
from planner.model.stage.chunked_loss import HeadAndLoss, chunked_code, end_within
from planner.model.stage.code import FUNCTIONS, compiled
from planner.model.stage.parts import Boundary, LayerObserver, Segment, Variant
from planner.model.stage.weights import holder_of, place_of, weights_of

# begins the names of constants and nested graphs, which are of this graph alone
CONSTANT = "_constant_"


class StageBlocks:
    """The blocks within `boundary` of a graph of blocks.

    Its `weights` are bare modules under the model's names, with the registries of the blocks'
    modules, because blocks must see when a stage that is moved replaces buffers.
    """

    def __init__(self, graph: LayerGraph, boundary: Boundary, variant: Variant) -> None:
        assert graph.blocks is not None
        self._chain = graph.blocks
        self._batch_spec = graph.batch_spec

        layers = [self._chain.layers[position] for position in boundary.positions]
        blocks = dict.fromkeys(block for layer in layers for _, block in layer.blocks)
        self._calls = {block: compiled(block) if variant.compiled else block for block in blocks}

        self.weights = nn.Module()
        inside = {module for block in blocks for module in block.modules()}
        for path, module in graph.model.named_modules(remove_duplicate=False):
            if module in inside:
                holder = holder_of(self.weights, path)
                for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                    holder.__dict__[registry] = getattr(module, registry)

        # Then the names that no module inside has: other names of tied weights, and weights that no
        # block uses.
        weights_of(graph, boundary.layers, self.weights)

    def code_of(self, index: int) -> Callable[..., Any]:
        """Return what runs the blocks of a layer: from the tensors that it takes to those that it
        makes, or the loss.

        The first layer takes the leaves of the arguments, the last one those of the target, too, at
        the end.
        """
        layer = self._chain.layers[index]
        loss = self._chain.loss
        modes = list(zip(layer.modules, layer.training, strict=True))
        # Only this layer's: the chain, which the function would keep, leads to the whole model's
        # weights.
        blocks = [(module, self._calls[module]) for _, module in layer.blocks]
        spec = self._batch_spec
        target_spec = spec.children()[-1]
        no_target = [None] * target_spec.num_leaves

        def first(values: Sequence[Any]) -> Any:
            """What the first block makes of the arguments."""
            args, kwargs, _ = spec.unflatten([*values, *no_target])
            return blocks[0][1](*args, **kwargs)

        def run(*values: Any) -> list[Tensor] | Tensor:
            end = len(values)
            if layer.gives is None:
                end -= target_spec.num_leaves
            # Stages in training and in evaluation run the same modules.
            set_modes(modes)

            if layer.takes is None:
                value = first(values[:end])
                rest = blocks[1:]
            else:
                value = layer.takes.value(values[:end])
                rest = blocks

            for _, block in rest:
                value = block(value)

            if layer.gives is None:
                return loss_of(value, target_spec.unflatten(values[end:]), loss)
            return layer.gives.tensors(value, layer.blocks[-1][0])

        return run


def made_last(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose backward runs first: autograd takes the highest sequence number
    first.
    """
    with_gradient = [tensor for tensor in tensors if tensor.grad_fn is not None]
    return max(with_gradient, key=_sequence_number, default=None)


def _sequence_number(tensor: Tensor) -> int:
    """Return when autograd recorded the operation of a tensor, relative to others."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def _notify(observer: LayerObserver | None, index: int, values: Sequence[Tensor]) -> None:
    if observer is not None:
        observer.after_layer(index, made_last(values))


def numbers_of(graph: LayerGraph, part: Boundary) -> dict[fx.Node, Any]:
    """Return the numbers that layers use and that depend on the batch size alone, as expressions of
    it.
    """
    values = {node: node.meta.get("val") for node in part.used}
    found = {
        node: graph.reader.expression(value) for node, value in values.items() if is_symbolic(value)
    }
    return {node: expression for node, expression in found.items() if expression is not None}


class SegmentBuilder:
    """Builder of a segment's code: the operations of its layers, or the blocks, copied into a graph
    of their own.

    Its `places` say where the user's file makes each value of the code, by the value's name; none
    of blocks.
    """

    def __init__(
        self,
        graph: LayerGraph,
        part: Boundary,
        variant: Variant,
        weights: nn.Module,
        blocks: StageBlocks | None,
    ) -> None:
        self._graph = graph
        self._part = part
        self._variant = variant
        self._blocks = blocks
        self._weights = weights
        self._compiled = variant.compiled and blocks is None  # each block is compiled by itself
        self.places: dict[str, str] = {}
        self._new = fx.Graph()
        self._kind: fx.Node | None = None  # of the device, for what runs under autocast
        self._region_writer = RegionWriter(self._new)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[fx.Node, str] = {}
        self._regions = variant.division.writer(graph, self._new)
        # what runs in chunks of the tokens
        self._end: HeadAndLoss | None = None
        if variant.loss_chunks > 1:
            self._end = end_within(graph, part.positions)

    def written(self) -> set[str]:
        """Return the names of the buffers that the built segment writes; blocks may write any of
        theirs.
        """
        if self._blocks is not None:
            return {name for layer in self._part.layers for name in layer.buffers}
        return {name for node, name in self._attributes.items() if node in self._graph.written}

    def build(self) -> Segment:
        """Return the code of the part, with the weights and attributes that it reads."""
        taken = [*self._part.takes, *numbers_of(self._graph, self._part)]
        makes = self._part.makes
        self._attributes = {
            source: self._attribute(source) for source in self._part.used if source.op == "get_attr"
        }

        names = self._take_weights()
        self._take_values(taken)
        self._copy_fixed()
        for index, layer in zip(self._part.positions, self._part.layers, strict=True):
            self._copy_layer(index, layer)
        self._region_writer.move_to(())
        self._new.output(tuple(self._regions.made(node, self._copies) for node in makes))

        run = self._function(names)
        self.places = {
            copy.name: place for node, copy in self._copies.items() if (place := user_place(node))
        }
        return Segment(run, tuple(node.name for node in taken), tuple(node.name for node in makes))

    def _take_weights(self) -> list[str]:
        """Make arguments of the weights that the code reads, and return their names.

        They are looked up before the code runs, because `nn.Module.__getattr__` searches at every
        dot of `self.block.qkv.weight`. That saves Python's time, which compiled code does not take.
        """
        if self._compiled:
            return []

        modules = dict(self._weights.named_modules())
        names = dict.fromkeys(name for name in self._attributes.values() if name not in modules)
        arguments = {
            name: self._new.placeholder(f"weight_{number}") for number, name in enumerate(names)
        }
        for node, name in self._attributes.items():
            if name in arguments:
                self._copies[node] = arguments[name]

        return list(names)

    def _take_values(self, taken: Sequence[fx.Node]) -> None:
        """Make arguments of everything else, and enter the values that the segment takes."""
        self._device = self._new.placeholder("device")
        self._key = self._new.placeholder("random_key")
        self._observer = self._new.placeholder("observer")
        for node in taken:
            self._copies[node] = self._new.placeholder(node.name)
        for node in taken:
            self._copies[node] = self._regions.taken(node, self._copies[node])

    def _function(self, names: Sequence[str]) -> Callable[..., Any]:
        """Return what runs the code with the weights of these names."""
        # Only the generated function is kept; the module around it, with the graph, is dropped.
        code = type(fx.GraphModule(self._weights, self._new)).forward
        if self._compiled:
            code = compiled(code, dynamic=bool(self._graph.lengths))
        weights = self._weights
        looked_up = [place_of(self._weights, name) for name in names]

        def forward(*values: Any) -> Any:
            return code(weights, *[registry[name] for registry, name in looked_up], *values)

        def forward_in_regions(device: torch.device, *values: Any) -> Any:
            with restored_after_failure(device.type):
                return forward(device, *values)

        if self._region_writer.used:
            return forward_in_regions
        return forward

    def _copy_layer(self, index: int, layer: GraphLayer) -> None:
        self._seed(index, layer)
        if self._blocks is not None:
            call, *_ = layer.nodes
            values = tuple(self._copies[value] for value in call.args[1:])  # type: ignore[index]
            self._copies[call] = self._new.call_function(self._blocks.code_of(index), values)

        in_chunks = () if self._end is None else self._end.replaced
        for node in layer.nodes:
            if self._end is not None and node is self._end.cross_entropy:
                self._copy_in_chunks(self._end)
            elif node not in self._copies and node not in in_chunks:
                self._copy_in_regions(node)

        if self._variant.observable:
            self._show(index, layer)

    def _seed(self, index: int, layer: GraphLayer) -> None:
        """Seed each random layer anew, so that its numbers do not depend on what the process ran
        before. From outside, one cannot see whether a block draws random numbers.
        """
        draws = any(is_random(node, self._graph.module) for node in layer.nodes)
        if draws or self._blocks is not None:
            reseeding: Any = reseed
            if self._compiled:
                reseeding = torch.compiler.disable(reseed)  # type: ignore[no-untyped-call]
            self._new.call_function(reseeding, (self._key, self._device, index))

    def _show(self, index: int, layer: GraphLayer) -> None:
        """Let the observer see, of a layer's values, the one whose backward runs first; of
        operations, that is the last.
        """
        specs = self._graph.specs
        path = self._graph.loss_path
        nodes = [
            node
            for node in layer.nodes
            if node in specs and specs[node].requires_grad and node in path
        ]
        if self._blocks is None:
            nodes = nodes[-1:]
        values = [self._copies[node] for node in nodes]
        self._new.call_function(_notify, (self._observer, index, values))

    def _copy_fixed(self) -> None:
        """Run what is fixed and read within regions first: it is in no region, and would be run
        where it is read.
        """
        nodes = [node for layer in self._part.layers for node in layer.nodes if regions_of(node)]
        for source in (source for node in nodes for source in node.all_input_nodes):
            if source in self._graph.fixed and source not in self._copies:
                self._copy(source)

    def _copy_in_regions(self, node: fx.Node) -> None:
        """Copy an operation such that it runs in its regions."""
        regions = regions_of(node)
        kind = None
        if any(region.grad is None for region in regions):
            kind = self._device_kind()
        self._region_writer.move_to(regions, kind)
        self._copy(node)

    def _device_kind(self) -> fx.Node:
        if self._kind is None:
            self._kind = self._new.call_function(getattr, (self._device, "type"))
        return self._kind

    def _copy_in_chunks(self, end: HeadAndLoss) -> None:
        """Call what computes the head and the loss in chunks, in place of the cross entropy.

        It is not compiled: the compiler would see that chunks compute the same twice, and keep it.
        """
        self._region_writer.move_to(())
        taken = (end.hidden, end.labels, *end.others)
        self._copy_sources(taken)
        code: Any = chunked_code(end, self._variant.loss_chunks)
        if self._compiled:
            code = torch.compiler.disable(code)  # type: ignore[no-untyped-call]
        values = tuple(self._copies[node] for node in taken)
        self._copies[end.cross_entropy] = self._new.call_function(code, values)

    def _copy_sources(self, sources: Iterable[fx.Node]) -> None:
        """Make weights and constants that an operation reads known to the code."""
        for source in sources:
            if source.op == "get_attr" and source not in self._copies:
                self._copies[source] = self._new.get_attr(self._attributes[source])
            # an earlier piece has run it for itself
            elif source in self._graph.fixed and source not in self._copies:
                self._copy(source)

    def _copy(self, node: fx.Node) -> None:
        self._copy_sources(node.all_input_nodes)
        if enters_autocast(node.target):
            self._device_kind()
        copy = self._new.node_copy(node, self._regions.reader(node, self._copies))
        # The stage runs where its inputs are.
        copy.args, copy.kwargs = moved(
            node.target, copy.args, copy.kwargs, self._device, self._kind
        )
        if not self._compiled:
            copy.target = FUNCTIONS.get(copy.target, copy.target)
        self._copies[node] = self._regions.result(node, copy)

    def _attribute(self, node: fx.Node) -> str:
        names = self._graph.names
        name = names.parameter(node) or names.buffer(node)
        if name is not None:
            return name
        constant = names.constant(node)
        place = CONSTANT + node.name
        if place in self._weights._buffers or place in self._weights._modules:
            return place  # another segment's, too
        # A constant moves with the stage as a buffer, but is not part of the model's state.
        if isinstance(constant, Tensor):
            self._weights.register_buffer(place, constant, persistent=False)
        else:
            self._weights.add_module(place, movable(constant))

        return place
