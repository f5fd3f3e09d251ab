"""LayerGraph + a run of layers -> a module that computes them and holds their weights, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from planner.errors import CaptureError
from planner.model.autocast import autocasting
from planner.model.batch import Batch
from planner.model.capture.batch_limits import least_batch_size
from planner.model.capture.failure import operation_failure, user_place
from planner.model.capture.graph import GraphLayer, LayerGraph, ValueSpec
from planner.model.capture.size import evaluate_number, is_symbolic
from planner.model.memory_format import lay_out
from planner.model.stage.block_stage import block_parts
from planner.model.stage.compiling import compiled, uncompiled
from planner.model.stage.deferred_norm import (
    DeferredNorm,
    RunningStatistics,
    counts_minibatches,
    deferred_arguments,
    running_statistics,
)
from planner.model.stage.fast_calls import FUNCTIONS, Registries
from planner.model.stage.parts import StageParts, exchange, stage_parts
from planner.model.stage.randomness import RandomKey, is_random, reseed
from planner.model.stage.weights import weights_of


class LayerObserver(Protocol):
    """Is told when each layer has run."""

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """Layer `index` of the graph has run; `value` is the last of its results that a gradient returns to."""
        ...


def _notify(observer: LayerObserver | None, index: int, value: Tensor | None) -> None:
    if observer is not None:
        observer.after_layer(index, value)


class StageModule(nn.Module):
    """Consecutive layers of a model.

    Its parameters and buffers are those of the original model (the same objects, under the same names), each tied
    parameter under all its names. Made by `build_stage`.

    Attributes:
        received: values that come from earlier stages, in the order in which they are made.
        sent: values that later stages use, made here or received and used here; with `keep`, those too.
        needs_batch: whether `forward` reads model inputs or targets.
        has_loss: whether `forward` returns the loss.
        layer_names: the layers.
    """

    _parts: StageParts
    _key: RandomKey
    _observer: LayerObserver | None

    def __init__(self, parts: StageParts) -> None:
        super().__init__()
        # One bare module holds the weights for the generated code, which looks them up there. The stage shares its
        # registries, so that .to(), state_dict() and the rest see them, and no model's names clash with the stage's.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = getattr(parts.weights, registry)
        # Past nn.Module's own assignment, which would take these names for the model's where it has the same.
        self.__dict__.update(_parts=parts, _key=RandomKey(), _observer=None)

    @property
    def received(self) -> tuple[ValueSpec, ...]:
        return self._parts.received

    @property
    def sent(self) -> tuple[ValueSpec, ...]:
        return self._parts.sent

    @property
    def needs_batch(self) -> bool:
        return bool(self._parts.inputs)

    @property
    def has_loss(self) -> bool:
        return self._parts.has_loss

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self._parts.layers)

    @property
    def deferred_norms(self) -> tuple[DeferredNorm, ...]:
        """BatchNorms that gather the statistics of their inputs; none unless built so."""
        return tuple(module for module in self._modules.values() if isinstance(module, DeferredNorm))

    @property
    def fixed_batch_size(self) -> int | None:
        """The only number of samples that it takes; None when it takes others."""
        return self._parts.fixed_batch_size

    @property
    def least_batch_size(self) -> int:
        """The fewest samples that it can be trained on."""
        return least_batch_size(self._parts.layers)

    def set_random_key(self, seed: int, minibatch: int, microbatch: int) -> None:
        """Make random numbers a function of these and of the layer: the same in any split of the model.

        Each layer that draws random numbers seeds the default generator of its device first. Without a key, the
        generator is left alone.
        """
        self._key.set(seed, minibatch, microbatch)

    def set_observer(self, observer: LayerObserver | None) -> None:
        """Tell `observer` of every layer's end from now on; needs a stage built with `observable`."""
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
        parts = self._parts
        inputs = parts.read_batch(batch) if parts.inputs else []
        values = [received[spec.name] for spec in parts.received]
        size = parts.batch_size(inputs, values)
        parts.check(inputs, values, size)
        numbers = [evaluate_number(expression, size) for expression in parts.numbers]
        context = (self._device(inputs, values), self._key, self._observer)
        with autocasting(context[0].type, parts.autocast):
            try:
                results = parts.code(parts.weights, *parts.registries, *context, *inputs, *values, *numbers)
            except (RuntimeError, IndexError, ValueError, TypeError) as cause:
                failure = operation_failure(cause, parts.places)
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
    graph: LayerGraph,
    layer_names: Sequence[str],
    keep: Sequence[str] = (),
    *,
    observable: bool = False,
    compile_: bool = False,
    defer_batch_norm: bool = False,
) -> StageModule:
    """The stage of `graph` that computes the layers named.

    Args:
        graph: stays usable; stages share its parameters.
        layer_names: consecutive layers.
        keep: further values made here that `forward` returns, for instance the model's outputs.
        observable: whether the stage tells its `observer` of every layer.
        compile_: whether torch.compile makes one piece of code of the layers, or of each block where the file names
            blocks; an observer would cut it into pieces.
        defer_batch_norm: whether BatchNorms in training gather the statistics of their inputs in `deferred_norms`,
            instead of updating their running statistics.

    Raises:
        CaptureError: when a layer is unknown, or the layers are not consecutive.
    """
    first, last = _range(graph, layer_names)
    assert not (observable and compile_), "what is compiled has no layers"
    if graph.blocks is not None:
        parts = block_parts(graph, first, last, keep, compile_=compile_, defer_batch_norm=defer_batch_norm)
    else:
        builder = _Builder(graph, first, last, compile_=compile_, defer_batch_norm=defer_batch_norm)
        parts = builder.build(keep, observable)
        parts = replace(parts, code=compiled(parts.code)) if compile_ else parts
    if graph.channels_last:
        lay_out(parts.weights)  # those that were made since the capture, too
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
    """Copies the operations of layers first..last into a graph of their own, and generates its code."""

    def __init__(self, graph: LayerGraph, first: int, last: int, *, compile_: bool, defer_batch_norm: bool) -> None:
        self._graph = graph
        self._first, self._last = first, last
        self._layers = graph.layers[first : last + 1]
        self._compile = compile_  # what will be compiled is left as it was captured
        self._reseed = uncompiled(reseed) if compile_ else reseed
        self._weights = weights_of(graph, self._layers)
        self._new = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[fx.Node, str] = {}
        self._deferred: dict[fx.Node, RunningStatistics] = {}
        if defer_batch_norm:
            nodes = [node for layer in self._layers for node in layer.nodes]
            found = {node: running_statistics(node, graph.names) for node in nodes}
            self._deferred = {node: running for node, running in found.items() if running is not None}

    def build(self, keep: Sequence[str], observable: bool) -> StageParts:
        graph = self._graph
        trade = exchange(graph, self._first, self._last, keep)
        self._declare([leaf.node for _, leaf in trade.inputs], trade.received)
        numbers = self._declare_numbers(trade.used)
        for index, layer in enumerate(self._layers, start=self._first):
            if any(is_random(node, graph.module) for node in layer.nodes):
                self._new.call_function(self._reseed, (self._key, self._device, index))
            for node in layer.nodes:
                self._copy(node)
            if observable:
                self._new.call_function(_notify, (self._observer, index, self._last_on_gradient_path(layer)))
        has_loss = graph.loss in self._copies
        results = [*trade.sent, graph.loss] if has_loss else trade.sent
        self._new.output(tuple(self._copies[node] for node in results))
        code = type(fx.GraphModule(self._weights, self._new)).forward
        places = {copy.name: place for node, copy in self._copies.items() if (place := user_place(node)) is not None}
        return stage_parts(graph, self._layers, trade, self._weights, code, numbers, places, self._registries.values)

    def _declare(self, inputs: Sequence[fx.Node], received: Sequence[fx.Node]) -> None:
        sources = (source for layer in self._layers for node in layer.nodes for source in node.all_input_nodes)
        self._attributes = {source: self._attribute(source) for source in sources if source.op == "get_attr"}
        is_module = dict(self._weights.named_modules())
        tensors = () if self._compile else (name for name in self._attributes.values() if name not in is_module)
        self._registries = Registries(self._weights, tensors, self._new)
        self._device = self._new.placeholder("device")
        self._key = self._new.placeholder("random_key")
        self._observer = self._new.placeholder("observer")
        for node in (*inputs, *received):
            self._copies[node] = self._new.placeholder(node.name)

    def _declare_numbers(self, used: Sequence[fx.Node]) -> list[Any]:
        """Numbers that depend on the batch size alone become arguments, computed by each stage itself."""
        expressions = []
        for node in used:
            expression = self._graph.reader.expression(node.meta["val"]) if is_symbolic(node.meta.get("val")) else None
            if expression is not None:
                self._copies[node] = self._new.placeholder(node.name)
                expressions.append(expression)
        return expressions

    def _copy(self, node: fx.Node) -> None:
        if self._deferred and counts_minibatches(node, self._graph.names, self._deferred.values()):
            return
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in self._copies:
                name = self._attributes[source]
                direct = name in self._registries
                self._copies[source] = self._registries.read(name) if direct else self._new.get_attr(name)
        if node in self._deferred:
            self._copies[node] = self._deferred_norm(node)
            return
        copy = self._new.node_copy(node, self._copies.__getitem__)
        # The tracer wrote down the device it ran on; the stage runs where its inputs are.
        copy.args, copy.kwargs = tree_map(
            lambda leaf: self._device if isinstance(leaf, torch.device) else leaf, (copy.args, copy.kwargs)
        )
        if not self._compile:
            copy.target = FUNCTIONS.get(copy.target, copy.target)
        self._copies[node] = copy

    def _deferred_norm(self, node: fx.Node) -> fx.Node:
        running = self._deferred[node]
        place = f"_deferred_{running.mean.replace('.', '_')}"
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
        place = f"_constant_{node.name}"
        if isinstance(constant, Tensor):
            self._weights.register_buffer(place, constant, persistent=False)
        else:
            self._weights.add_module(place, constant)
        return place
