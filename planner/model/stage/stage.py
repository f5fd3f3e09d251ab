"""Build a stage: a module that computes consecutive layers of a LayerGraph, and holds their weights and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from planner.errors import CaptureError
from planner.model.autocast import autocasting
from planner.model.batch import Batch
from planner.model.capture.devices import enters_autocast, movable, moved
from planner.model.capture.failure import operation_failure, user_place
from planner.model.capture.graph import GraphLayer, LayerGraph, ValueSpec
from planner.model.capture.size import is_symbolic
from planner.model.memory_format import lay_out
from planner.model.stage.block_stage import block_parts
from planner.model.stage.compiling import compiled, uncompiled
from planner.model.stage.deferred_norm import (
    DeferredNorm,
    RunningStatistics,
    counts_minibatches,
    deferred_arguments,
    deferred_name,
    running_statistics,
)
from planner.model.stage.fast_calls import FUNCTIONS, Registries
from planner.model.stage.parts import AS_CAPTURED, Boundary, StageCode, StageParts, Variant, boundary_of, stage_parts
from planner.model.stage.randomness import RandomKey, is_random, reseed
from planner.model.stage.weights import weights_of

CONSTANT = "_constant_"  # begins the names of constants and nested graphs, which are of this graph alone


class LayerObserver(Protocol):
    """Protocol of what is told when each layer has run."""

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """Layer `index` has run; `value` is the last of its results to need a gradient, whose backward runs first."""
        ...


def _notify(observer: LayerObserver | None, index: int, value: Tensor | None) -> None:
    if observer is not None:
        observer.after_layer(index, value)


class StageModule(nn.Module):
    """Consecutive layers of a model.

    Its parameters and buffers are those of the original model: the same objects under the same names, each tied
    parameter under all its names. Made by `build_stage`.
    """

    _parts: StageParts
    _key: RandomKey
    _observer: LayerObserver | None

    def __init__(self, parts: StageParts) -> None:
        super().__init__()
        # The generated code looks the weights up in a module of their own. The stage shares that module's registries,
        # so that .to(), state_dict() and the like see the weights.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = getattr(parts.weights, registry)
        # Not by nn.Module's assignment, which would write to the model's registries where it has the same names.
        self.__dict__.update(_parts=parts, _key=RandomKey(), _observer=None)

    @property
    def received(self) -> tuple[ValueSpec, ...]:
        """Values that come from earlier stages, in the order in which they are made."""
        return self._parts.received

    @property
    def sent(self) -> tuple[ValueSpec, ...]:
        """Values that later stages use, made here or received and used here, and those that were to be kept."""
        return self._parts.sent

    @property
    def needs_batch(self) -> bool:
        """Whether `forward` reads model inputs or targets."""
        return bool(self._parts.inputs)

    @property
    def has_loss(self) -> bool:
        """Whether `forward` returns the loss."""
        return self._parts.has_loss

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers."""
        return self._parts.layer_names

    @property
    def deferred_norms(self) -> tuple[DeferredNorm, ...]:
        """BatchNorms that gather the statistics of their inputs; none unless built so."""
        return tuple(module for module in self._modules.values() if isinstance(module, DeferredNorm))

    @property
    def fixed_batch_size(self) -> int | None:
        """The only number of samples that the stage takes; None when it takes any."""
        return self._parts.fixed_batch_size

    @property
    def least_batch_size(self) -> int:
        """The fewest samples that the stage can be trained on."""
        return self._parts.least_batch_size

    def set_random_key(self, seed: int, minibatch: int, microbatch: int) -> None:
        """Make random numbers a function of these and of the layer, so that they are equal in any split of the model.

        Each layer that draws random numbers then seeds the default generator of its device first.
        """
        self._key.set(seed, minibatch, microbatch)

    def arrange(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        """Lay out `tensors`, which stand for some of the stage's `parameters` one for one, as their kernels need it."""
        standing_for = {id(parameter): tensor for parameter, tensor in zip(parameters, tensors, strict=True)}
        for recurrent in self._parts.recurrent:
            weights = [standing_for.get(id(self.get_parameter(name))) for name in recurrent.names]
            known = [weight for weight in weights if weight is not None]
            if len(known) == len(weights):
                recurrent.join(known)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StageModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        parameters = list(self.parameters())
        self.arrange(parameters, parameters)  # not their `data`, whose new place would not be theirs
        return self

    def set_observer(self, observer: LayerObserver | None) -> None:
        """Tell `observer` of every layer from now on; the stage must have been built observable."""
        self.__dict__["_observer"] = observer

    def forward(self, batch: Batch | None, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the layers.

        Args:
            batch: on the stage's device; may be None when `needs_batch` is False.
            received: the values named in `self.received`, of the shapes given there.

        Returns:
            The values named in `self.sent`, and "loss" (0-dimensional) where the stage has it.

        Raises:
            ModelFileError: when the batch is not like the example batch.
            LayerError: when a captured operation fails, with its place in the user's file.
        """
        parts, code = self._parts, self._parts.code
        inputs = parts.read_batch(batch) if parts.inputs else []
        values = [received[spec.name] for spec in parts.received]
        numbers = parts.numbers(inputs, values)
        context = (self._device(inputs, values), self._key, self._observer)
        with autocasting(context[0].type, parts.autocast):
            try:
                results = code.run(parts.weights, *code.registries, *context, *inputs, *values, *numbers)
            except (RuntimeError, IndexError, ValueError, TypeError) as cause:
                failure = operation_failure(cause, code.places)
                if failure is None:
                    raise
                raise failure from cause
        return dict(zip(parts.results, results, strict=True))

    def _device(self, inputs: list[Any], values: list[Tensor]) -> torch.device:
        for tensor in (*values, *inputs):
            if isinstance(tensor, Tensor):
                return tensor.device
        return next((tensor.device for tensor in self.parameters()), torch.device("cpu"))


def build_stage(
    graph: LayerGraph, layer_names: Sequence[str], keep: Sequence[str] = (), variant: Variant = AS_CAPTURED
) -> StageModule:
    """Return the stage of `graph` that computes the layers named.

    Args:
        graph: stays usable; stages share its parameters.
        layer_names: consecutive layers.
        keep: further values made here that `forward` returns, for instance the model's outputs.
        variant: how its code departs from the operations as captured.

    Raises:
        CaptureError: when a layer is unknown, or the layers are not consecutive.
    """
    boundary = boundary_of(graph, *_range(graph, layer_names), keep)
    if graph.blocks is not None:
        parts = block_parts(graph, boundary, variant)
    else:
        parts = _Builder(graph, boundary, variant).build()
    if graph.options.channels_last:
        lay_out(parts.weights)  # again, for deferred weights: they were made after the capture
    return StageModule(parts)


def _range(graph: LayerGraph, layer_names: Sequence[str]) -> tuple[int, int]:
    for name in layer_names:
        if name not in graph.position:
            raise CaptureError(f"the model has no layer '{name}'", hint="was the plan made for this model?")
    positions = [graph.position[name] for name in layer_names]
    if not positions or positions != list(range(positions[0], positions[0] + len(positions))):
        raise CaptureError(
            f"the layers {list(layer_names)} do not follow one another in the model",
            hint="a stage is a run of consecutive layers",
        )
    return positions[0], positions[-1]


class _Builder:
    """Builder of a stage's code: the operations of its layers, copied into a graph of their own."""

    def __init__(self, graph: LayerGraph, boundary: Boundary, variant: Variant) -> None:
        self._graph, self._boundary, self._variant = graph, boundary, variant
        self._layers = boundary.layers
        self._reseed = uncompiled(reseed) if variant.compiled else reseed
        self._weights = weights_of(graph, self._layers)
        self._new = fx.Graph()
        self._kind: fx.Node | None = None  # of the device, for the graphs nested within that run under autocast
        self._copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[fx.Node, str] = {}
        self._deferred: dict[fx.Node, RunningStatistics] = {}
        if variant.defer_batch_norm:
            nodes = [node for layer in self._layers for node in layer.nodes]
            found = {node: running_statistics(node, graph.names) for node in nodes}
            self._deferred = {node: running for node, running in found.items() if running is not None}

    def build(self) -> StageParts:
        graph, boundary = self._graph, self._boundary
        self._declare([leaf.node for _, leaf in boundary.inputs], boundary.received)
        numbers = self._declare_numbers(boundary.used)
        for index, layer in enumerate(self._layers, start=boundary.first):
            # Each random layer is seeded anew, so that its numbers do not depend on what the process ran before.
            if any(is_random(node, graph.module) for node in layer.nodes):
                self._new.call_function(self._reseed, (self._key, self._device, index))
            for node in layer.nodes:
                self._copy(node)
            if self._variant.observable:
                self._new.call_function(_notify, (self._observer, index, self._last_on_gradient_path(layer)))
        results = [*boundary.sent, graph.loss] if boundary.has_loss else boundary.sent
        self._new.output(tuple(self._copies[node] for node in results))
        # Only the generated function is kept; the module around it, with the graph, is dropped.
        run = type(fx.GraphModule(self._weights, self._new)).forward
        places = {copy.name: place for node, copy in self._copies.items() if (place := user_place(node)) is not None}
        run = compiled(run) if self._variant.compiled else run
        return stage_parts(graph, boundary, self._weights, StageCode(run, self._registries.values, numbers, places))

    def _declare(self, inputs: Sequence[fx.Node], received: Sequence[fx.Node]) -> None:
        """Make the arguments of the code, in the order of `StageCode.run`."""
        sources = (source for layer in self._layers for node in layer.nodes for source in node.all_input_nodes)
        self._attributes = {source: self._attribute(source) for source in sources if source.op == "get_attr"}
        is_module = dict(self._weights.named_modules())
        # Fast calls and look-ups save Python's time, which compiled code does not take.
        tensors = () if self._variant.compiled else (n for n in self._attributes.values() if n not in is_module)
        self._registries = Registries(self._weights, tensors, self._new)
        self._device = self._new.placeholder("device")
        self._key = self._new.placeholder("random_key")
        self._observer = self._new.placeholder("observer")
        for node in (*inputs, *received):
            self._copies[node] = self._new.placeholder(node.name)

    def _declare_numbers(self, used: Sequence[fx.Node]) -> tuple[Any, ...]:
        """Make arguments of the numbers that depend on the batch size alone, which each stage computes itself."""
        expressions = []
        for node in used:
            expression = self._graph.reader.expression(node.meta["val"]) if is_symbolic(node.meta.get("val")) else None
            if expression is not None:
                self._copies[node] = self._new.placeholder(node.name)
                expressions.append(expression)
        return tuple(expressions)

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
        copy = self._new.node_copy(node, self._copies.__getitem__)
        # The stage runs where its inputs are.
        copy.args, copy.kwargs = moved(node.target, copy.args, copy.kwargs, self._device, self._kind)
        if not self._variant.compiled:
            copy.target = FUNCTIONS.get(copy.target, copy.target)
        self._copies[node] = copy

    def _deferred_norm(self, node: fx.Node) -> fx.Node:
        running = self._deferred[node]
        place = deferred_name(running.mean)
        if place not in self._weights._modules:
            self._weights.add_module(place, DeferredNorm(running, self._weights.get_buffer(running.mean)))
        given = deferred_arguments(node)
        return self._new.call_module(place, tuple(self._copies[a] if isinstance(a, fx.Node) else a for a in given))

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
        # A constant moves with the stage as a buffer, but is not part of the model's state.
        if isinstance(constant, Tensor):
            self._weights.register_buffer(place, constant, persistent=False)
        else:
            self._weights.add_module(place, movable(constant))
        return place
