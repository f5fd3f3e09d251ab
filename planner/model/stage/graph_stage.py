"""Build a stage of a captured model: it runs generated code, the operations of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from planner.model.capture.failure import user_place
from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.model.capture.operations import enters_autocast, is_random, movable, moved
from planner.model.capture.size import is_symbolic
from planner.model.randomness import reseed
from planner.model.stage.code import FUNCTIONS, Registries, compiled, uncompiled
from planner.model.stage.deferred_norm import (
    DeferredNorm,
    RunningStatistics,
    counts_minibatches,
    deferred_arguments,
    deferred_name,
    running_statistics,
)
from planner.model.stage.parts import Boundary, LayerObserver, Segment, Variant
from planner.model.stage.weights import weights_of
from planner.model.tensor.regions import Regions

CONSTANT = "_constant_"  # begins the names of constants and nested graphs, which are of this graph alone


def _notify(observer: LayerObserver | None, index: int, value: Tensor | None) -> None:
    if observer is not None:
        observer.after_layer(index, value)


class GraphCode:
    """The code of the stage within `boundary`: generated, in segments."""

    def __init__(self, graph: LayerGraph, boundary: Boundary, variant: Variant) -> None:
        self._graph, self._variant = graph, variant
        self.weights = weights_of(graph, boundary.layers)
        self.numbers = _numbers(graph, boundary)
        self.places: dict[str, str] = {}

    def segment(self, part: Boundary) -> tuple[Segment, set[str]]:
        """Return the segment within `part`, and the names of the buffers that it reads."""
        builder = _Builder(self._graph, part, self._variant, self.weights)
        segment = builder.build()
        self.places |= builder.places
        return segment, builder.buffers()


def _numbers(graph: LayerGraph, boundary: Boundary) -> dict[fx.Node, Any]:
    """Return the numbers that the layers use and that depend on the batch size alone, as expressions of it."""
    numbers = {}
    for node in boundary.used:
        expression = graph.reader.expression(node.meta["val"]) if is_symbolic(node.meta.get("val")) else None
        if expression is not None:
            numbers[node] = expression
    return numbers


class _Builder:
    """Builder of a segment's code: the operations of its layers, copied into a graph of their own.

    Args:
        weights: of the stage; constants and modules of the segment are added.
    """

    def __init__(self, graph: LayerGraph, boundary: Boundary, variant: Variant, weights: nn.Module) -> None:
        self._graph, self._boundary, self._variant = graph, boundary, variant
        self._layers = boundary.layers
        self._reseed = uncompiled(reseed) if variant.compiled else reseed
        self._weights = weights
        self.places: dict[str, str] = {}  # where the user's file makes each value of the code
        self._new = fx.Graph()
        self._kind: fx.Node | None = None  # of the device, for the graphs nested within that run under autocast
        self._copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[fx.Node, str] = {}
        self._regions = Regions(graph, variant.division, self._new)
        self._deferred: dict[fx.Node, RunningStatistics] = {}
        if variant.defer_batch_norm:
            nodes = [node for layer in self._layers for node in layer.nodes]
            found = {node: running_statistics(node, graph.names) for node in nodes}
            self._deferred = {node: running for node, running in found.items() if running is not None}

    def build(self) -> Segment:
        graph, boundary = self._graph, self._boundary
        taken = [*boundary.takes, *_numbers(graph, boundary)]
        self._declare(taken)
        for index, layer in enumerate(self._layers, start=boundary.first):
            # Each random layer is seeded anew, so that its numbers do not depend on what the process ran before.
            if any(is_random(node, graph.module) for node in layer.nodes):
                self._new.call_function(self._reseed, (self._key, self._device, index))
            for node in layer.nodes:
                self._copy(node)
            if self._variant.observable:
                self._new.call_function(_notify, (self._observer, index, self._last_on_gradient_path(layer)))
        self._new.output(tuple(self._regions.whole(node, self._copies) for node in boundary.makes))
        # Only the generated function is kept; the module around it, with the graph, is dropped.
        run = type(fx.GraphModule(self._weights, self._new)).forward
        self.places = {copy.name: place for node, copy in self._copies.items() if (place := user_place(node))}
        run = compiled(run) if self._variant.compiled else run
        names = (tuple(node.name for node in nodes) for nodes in (taken, boundary.makes))
        return Segment(run, self._registries.values, *names)

    def buffers(self) -> set[str]:
        """Return the names of buffers that the segment reads, constants and those of nested graphs among them."""
        names = {name for layer in self._layers for name in layer.buffers} | set(self._attributes.values())
        return names | {deferred_name(running.mean) for running in self._deferred.values()}

    def _declare(self, taken: Sequence[fx.Node]) -> None:
        """Make the arguments of the code, in the order of `Segment.run`."""
        sources = (source for layer in self._layers for node in layer.nodes for source in node.all_input_nodes)
        self._attributes = {source: self._attribute(source) for source in sources if source.op == "get_attr"}
        is_module = dict(self._weights.named_modules())
        # Fast calls and look-ups save Python's time, which compiled code does not take.
        tensors = () if self._variant.compiled else (n for n in self._attributes.values() if n not in is_module)
        self._registries = Registries(self._weights, tensors, self._new)
        self._device = self._new.placeholder("device")
        self._key = self._new.placeholder("random_key")
        self._observer = self._new.placeholder("observer")
        for node in taken:
            self._copies[node] = self._new.placeholder(node.name)

    def _copy(self, node: fx.Node) -> None:
        if self._deferred and counts_minibatches(node, self._graph.names, self._deferred.values()):
            return  # the executor counts whole minibatches instead
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in self._copies:
                name = self._attributes[source]
                known = name in self._registries
                self._copies[source] = self._registries.read(name) if known else self._new.get_attr(name)
        if node in self._deferred:
            self._copies[node] = self._deferred_norm(node)
            return
        if enters_autocast(node.target) and self._kind is None:
            self._kind = self._new.call_function(getattr, (self._device, "type"))
        copy = self._new.node_copy(node, self._regions.reader(node, self._copies))
        # The stage runs where its inputs are.
        copy.args, copy.kwargs = moved(node.target, copy.args, copy.kwargs, self._device, self._kind)
        if not self._variant.compiled:
            copy.target = FUNCTIONS.get(copy.target, copy.target)
        self._copies[node] = self._regions.result(node, copy)

    def _deferred_norm(self, node: fx.Node) -> fx.Node:
        running = self._deferred[node]
        place = deferred_name(running.mean)
        if place not in self._weights._modules:
            self._weights.add_module(place, DeferredNorm(running, self._weights.get_buffer(running.mean)))
        given = deferred_arguments(node)
        return self._new.call_module(
            place, tuple(self._regions.whole(a, self._copies) if isinstance(a, fx.Node) else a for a in given)
        )

    def _last_on_gradient_path(self, layer: GraphLayer) -> fx.Node | None:
        for node in reversed(layer.nodes):
            spec = self._graph.specs.get(node)
            if spec is not None and spec.requires_grad and node in self._graph.loss_path:
                return self._copies[node]
        return None

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
