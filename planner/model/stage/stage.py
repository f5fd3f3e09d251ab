"""Build a stage: a module that computes consecutive layers of a LayerGraph, and holds their weights and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import CaptureError
from planner.model.batch import Batch
from planner.model.capture.failure import operation_failure
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.options import autocasting, lay_out
from planner.model.randomness import RandomKey, keep_state
from planner.model.stage.deferred_norm import DeferredNorm
from planner.model.stage.graph_stage import StageCode
from planner.model.stage.parts import AS_CAPTURED, LayerObserver, StageParts, Variant, least_batch_size, stage_boundary
from planner.model.stage.segments import FAILURES, divided, joined, places_of, recomputing
from planner.model.stage.weights import recurrent_weights
from planner.model.tensor.division import UNDIVIDED, DividedWeights


class StageModule(nn.Module):
    """Consecutive layers of a model.

    Its parameters and buffers are those of the original model: the same objects under the same names, each tied
    parameter under all its names. Made by `build_stage`.

    Attributes:
        layer_names: the layers.
        received: values that come from earlier stages, in the order in which they are made.
        sent: values that later stages use, made here or received and used here, and those that were to be kept.
        has_loss: whether `forward` returns the loss.
        fixed_batch_size: the only number of samples that the stage takes; None when it takes any.
        least_batch_size: the fewest samples that the stage can be trained on.
        division: which of its weights are parts.
    """

    layer_names: tuple[str, ...]
    received: tuple[ValueSpec, ...]
    sent: tuple[ValueSpec, ...]
    has_loss: bool
    fixed_batch_size: int | None
    least_batch_size: int
    division: DividedWeights
    _parts: StageParts
    _key: RandomKey
    _observer: LayerObserver | None

    def __init__(self, parts: StageParts, division: DividedWeights = UNDIVIDED) -> None:
        super().__init__()
        # The generated code looks the weights up in a module of their own. The stage shares that module's registries,
        # so that .to(), state_dict() and the like see the weights.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = getattr(parts.weights, registry)
        # Not by nn.Module's assignment, which would write to the model's registries where it has the same names.
        self.__dict__.update(_parts=parts, _key=RandomKey(), _observer=None, division=division)
        public = ("layer_names", "received", "sent", "has_loss", "fixed_batch_size", "least_batch_size")
        self.__dict__.update({name: getattr(parts, name) for name in public})

    @property
    def needs_batch(self) -> bool:
        """Whether `forward` reads model inputs or targets."""
        return bool(self._parts.inputs)

    @property
    def deferred_norms(self) -> tuple[DeferredNorm, ...]:
        """BatchNorms that gather the statistics of their inputs; none unless built so."""
        return tuple(module for module in self._modules.values() if isinstance(module, DeferredNorm))

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
                results = code.run(*context, *inputs, *values, *numbers)
            except FAILURES as cause:
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
    graph: LayerGraph, layer_names: Sequence[str], keep: Sequence[str] = (), variant: Variant = AS_CAPTURED
) -> StageModule:
    """Return the stage of `graph` that computes the layers named.

    Args:
        graph: stays usable; stages share its parameters.
        keep: further values made here that `forward` returns, for instance the model's outputs.
        variant: how its code departs from the operations as captured.

    Raises:
        CaptureError: when a layer is unknown, or the layers are not consecutive.
    """
    boundary = stage_boundary(graph, *_range(graph, layer_names), keep)
    code = StageCode(graph, boundary, variant)
    segments = []
    for part, again in divided(graph, boundary, variant.recompute):
        segment, buffers = code.segment(part)
        if again:
            segment = recomputing(segment, places_of(code.weights, buffers), code.places)
        segments.append(segment)
    takes = [node.name for node in (*boundary.takes, *code.numbers)]
    parts = StageParts(
        layer_names=tuple(layer.name for layer in boundary.layers),
        least_batch_size=least_batch_size(boundary.layers),
        weights=code.weights,
        code=joined(segments, takes, [node.name for node in boundary.makes]),
        expressions=tuple(code.numbers.values()),
        places=code.places,
        batch_spec=graph.batch_spec,
        inputs=tuple((index, leaf.spec) for index, leaf in boundary.inputs),
        received=tuple(graph.specs[node] for node in boundary.received),
        sent=tuple(graph.specs[node] for node in boundary.sent),
        has_loss=boundary.loss is not None,
        fixed_batch_size=graph.batch_size,
        autocast=graph.options.autocast,
        channels_last=graph.options.channels_last,
        recurrent=recurrent_weights(graph, boundary.layers),
    )
    if graph.options.channels_last:
        lay_out(parts.weights)  # again, for deferred weights: they were made after the capture
    return StageModule(parts, variant.division)


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


def warm_up(stage: StageModule, batch: Batch) -> None:
    """Run `stage` on zeros instead of what earlier stages send, then restore buffers and random state.

    Args:
        stage: on its device, without gradients.
        batch: any of the size to come, on the same device.
    """
    with keep_state(stage) as device:
        received = {spec.name: _zeros(spec, batch.size, device) for spec in stage.received}
        results = stage(batch if stage.needs_batch else None, received)
        roots = [value for value in results.values() if value.requires_grad and value.grad_fn is not None]
        if roots:
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    for parameter in stage.parameters():
        parameter.grad = None


def _zeros(spec: ValueSpec, batch_size: int, device: torch.device) -> Tensor:
    # Through the wire, because compiled code depends on the strides that a received value has.
    wire = torch.zeros(spec.wire_shape(batch_size), dtype=spec.dtype, device=device)
    return spec.from_wire(wire, batch_size).requires_grad_(spec.requires_grad)


class ChainedStage(nn.Module):
    """Consecutive layers that take all values crossing the cut before them, and return those crossing the cut after.

    Values that only later stages use are passed on. Tensors have the form of messages: contiguous, expanded dimensions
    once. The last stage returns the loss alone, of shape (1,). Model inputs and targets are not passed: see `begin`.

    Args:
        graph: of the model; it says whether the layers go through torch.compile.
        recompute: groups of layers that keep only what enters them for the backward.
    """

    def __init__(
        self,
        graph: LayerGraph,
        layers: Sequence[str],
        microbatch_size: int,
        *,
        seed: int = 0,
        recompute: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__()
        variant = Variant(compiled=graph.options.compiled, recompute=tuple(map(tuple, recompute)))
        self.stage = build_stage(graph, layers, variant=variant)
        first, last = graph.position[layers[0]], graph.position[layers[-1]]
        self.received, self.sent = cut_values(graph, first), cut_values(graph, last + 1)
        self._size = microbatch_size
        self._seed = seed
        self._upcoming: list[tuple[int, int, Batch]] = []

    @property
    def input_args(self) -> tuple[Tensor, ...]:
        """Examples, on the meta device, of the tensors that `forward` takes."""
        return tuple(self._example(spec) for spec in self.received)

    @property
    def output_args(self) -> tuple[Tensor, ...]:
        """Examples, on the meta device, of the tensors that `forward` returns."""
        if self.stage.has_loss:
            return (torch.empty(1, device="meta").requires_grad_(),)
        return tuple(self._example(spec) for spec in self.sent)

    def begin(self, minibatch: int, batches: Mapping[int, Batch]) -> None:
        """Set the microbatches of `minibatch`, by number, that the next calls of `forward` run in order."""
        self._upcoming = [(minibatch, microbatch, batch) for microbatch, batch in batches.items()]

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers on the next microbatch."""
        minibatch, microbatch, batch = self._upcoming.pop(0)
        self.stage.set_random_key(self._seed, minibatch, microbatch)
        wires = {spec.name: tensor for spec, tensor in zip(self.received, received, strict=True)}
        values = {spec.name: spec.from_wire(wires[spec.name], self._size) for spec in self.received}
        results = self.stage(batch, {spec.name: values[spec.name] for spec in self.stage.received})
        if self.stage.has_loss:
            loss: Tensor = results["loss"]
            return loss.reshape(1)
        return tuple(
            spec.to_wire(results[spec.name]).contiguous() if spec.name in results else wires[spec.name]
            for spec in self.sent
        )

    def _example(self, spec: ValueSpec) -> Tensor:
        example = torch.empty(spec.wire_shape(self._size), dtype=spec.dtype, device="meta")
        return example.requires_grad_(spec.requires_grad)


def cut_values(graph: LayerGraph, position: int) -> tuple[ValueSpec, ...]:
    """Return the values that layers before `position` make and layers from there on use."""
    return tuple(
        graph.specs[node]
        for node in graph.crossing
        if graph.owner[node] < position and graph.last_use(node) >= position
    )
