"""The parts of a stage, whether its layers are generated code or the user's own modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec

from planner.errors import ModelFileError
from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, GraphLayer, Input, LayerGraph, ValueSpec
from planner.model.capture.size import evaluate_number, samples_in
from planner.model.options import channels_last
from planner.model.stage.deferred_norm import TRAINING
from planner.model.stage.weights import RecurrentWeights
from planner.model.tensor.division import UNDIVIDED, DividedWeights


class LayerObserver(Protocol):
    """Protocol of what is told when each layer has run."""

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """Layer `index` has run; `value` is the last of its results to need a gradient, whose backward runs first."""
        ...


@dataclass(frozen=True)
class Variant:
    """How a stage's code departs from the operations as captured.

    Attributes:
        observable: whether the stage tells its observer of every layer.
        compiled: whether torch.compile makes one piece of code of the layers, or of each block where the file names
            blocks. It excludes `observable`, which would cut the code into pieces.
        defer_batch_norm: whether BatchNorms in training gather the statistics of their inputs in `deferred_norms`,
            instead of updating their running statistics.
        recompute: groups of layers, by name, that keep only the values that enter them, and run their forward again
            right before their own backward. It excludes `observable`: layers would be told of twice.
        division: the weights that a group of ranks divides.
    """

    observable: bool = False
    compiled: bool = False
    defer_batch_norm: bool = False
    recompute: tuple[tuple[str, ...], ...] = ()
    division: DividedWeights = UNDIVIDED

    def __post_init__(self) -> None:
        assert not (self.observable and self.compiled), "what is compiled has no layers"
        assert not (self.observable and self.recompute), "a second forward would be observed, too"


AS_CAPTURED = Variant()
OBSERVABLE = Variant(observable=True)
COMPILED = Variant(compiled=True)


@dataclass(frozen=True)
class Boundary:
    """The values that layers first..last of a graph exchange with the rest."""

    first: int
    last: int
    layers: tuple[GraphLayer, ...]  # first..last
    used: tuple[fx.Node, ...]  # every node that they read
    inputs: tuple[tuple[int, Input], ...]  # leaves of the batch, with their index there
    received: tuple[fx.Node, ...]  # from earlier stages
    sent: tuple[fx.Node, ...]  # to later stages, made here or received
    loss: fx.Node | None  # the node that makes it, if it is here

    @property
    def takes(self) -> tuple[fx.Node, ...]:
        """The values that the layers' code takes, besides numbers."""
        return (*(leaf.node for _, leaf in self.inputs), *self.received)

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """The values that the layers' code returns."""
        return self.sent if self.loss is None else (*self.sent, self.loss)


def boundary_of(graph: LayerGraph, first: int, last: int, keep: Sequence[str] = ()) -> Boundary:
    """Return the boundary of layers first..last; `keep` names further values made here that count as sent."""
    layers = graph.layers[first : last + 1]
    used = dict.fromkeys(source for layer in layers for node in layer.nodes for source in node.all_input_nodes)
    inputs = [(i, leaf) for i, leaf in enumerate(graph.inputs) if leaf.node in used]
    received = [node for node in graph.crossing if node in used and graph.owner[node] < first]
    made = [node for layer in layers for node in layer.nodes]
    sent = [node for node in (*received, *made) if graph.last_use(node) > last or node.name in keep]
    loss = graph.loss if graph.loss in made else None
    return Boundary(first, last, layers, tuple(used), tuple(inputs), tuple(received), tuple(sent), loss)


def stage_boundary(graph: LayerGraph, first: int, last: int, keep: Sequence[str]) -> Boundary:
    """Return the boundary of a stage: as `boundary_of`, but something that it takes tells the size of the batch."""
    boundary = boundary_of(graph, first, last, keep)

    def tells_batch_size(node: fx.Node) -> bool:
        return node in graph.specs and any(samples_in(size, 0) is not None for size in graph.specs[node].sizes)

    if any(tells_batch_size(node) for node in boundary.takes):
        return boundary
    # Layers that use no input may still depend on the size of the batch.
    telling = [(i, leaf) for i, leaf in enumerate(graph.inputs) if tells_batch_size(leaf.node)]
    return replace(boundary, inputs=(*boundary.inputs, *telling[:1]))


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of a stage that run as one piece of code."""

    run: Callable[..., tuple[Tensor, ...]]  # (device, key, observer, *taken) -> made
    takes: tuple[str, ...]  # names of the values that it reads: the stage's own, or those that earlier segments make
    makes: tuple[str, ...]  # names of the values that `run` returns


@dataclass(frozen=True)
class StageParts:
    """What a stage consists of. It keeps no graph and no node: these lead to the whole model's weights."""

    layer_names: tuple[str, ...]
    least_batch_size: int  # the fewest samples that it can be trained on
    weights: nn.Module
    code: Segment  # it takes the inputs, the received values and the numbers; it makes the sent values, then the loss
    expressions: tuple[Any, ...]  # in the batch size, of the numbers that the code takes
    places: Mapping[str, str]  # where the user's file makes each value of the code, by the value's name
    batch_spec: TreeSpec
    inputs: tuple[tuple[int, ValueSpec | None], ...]  # index among the batch's leaves
    received: tuple[ValueSpec, ...]
    sent: tuple[ValueSpec, ...]
    has_loss: bool
    fixed_batch_size: int | None  # the only number of samples that it takes; None when it takes any
    autocast: torch.dtype | None
    channels_last: bool
    recurrent: tuple[RecurrentWeights, ...]
    _numbers: dict[tuple[tuple[torch.Size, torch.dtype], ...], list[Any]] = field(default_factory=dict)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Names of what the code returns."""
        return (*(spec.name for spec in self.sent), *([LOSS] if self.has_loss else []))

    def read_batch(self, batch: Batch | None) -> list[Any]:
        """Return the leaves of the batch that the stage reads.

        Raises:
            ModelFileError: when there is no batch, or its structure is not that of the example batch.
        """
        if batch is None:
            raise ModelFileError("this stage reads the batch, but got none", hint="pass the batch to every stage")
        leaves, spec = batch.flatten()
        if spec != self.batch_spec and _structure(spec) != _structure(self.batch_spec):
            raise ModelFileError(
                f"a batch's (args, kwargs, target) are {_outline(spec)}, but those of example_batch() were "
                f"{_outline(self.batch_spec)}",
                hint="dataset() and example_batch() must give the model the same arguments",
            )
        if not self.channels_last:
            return [leaves[index] for index, _ in self.inputs]
        arguments = len(leaves) - spec.children()[-1].num_leaves  # targets keep their layout
        return [
            channels_last(leaf) if index < arguments and isinstance(leaf := leaves[index], Tensor) else leaves[index]
            for index, _ in self.inputs
        ]

    def numbers(self, inputs: Sequence[Any], received: Sequence[Tensor]) -> Sequence[Any]:
        """Return the numbers that the code takes with these values, whose dtypes and shapes are checked.

        What values of some shapes and dtypes give is kept: a run has one or two sizes of microbatches.

        Raises:
            ModelFileError: when an input is not like that of the example batch.
        """
        given = [*zip(self.received, received, strict=True)]
        given += [(spec, leaf) for (_, spec), leaf in zip(self.inputs, inputs, strict=True) if spec is not None]
        seen = tuple([(tensor.shape, tensor.dtype) for _, tensor in given])
        found = self._numbers.get(seen)
        if found is None:
            size = self._batch_size(given)
            for spec, tensor in given:
                if tensor.dtype != spec.dtype or tensor.shape != spec.shape(size):
                    raise ModelFileError(
                        f"batch input '{spec.name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, the model was "
                        f"captured with {spec.dtype} of shape {spec.shape(size)}",
                        hint="dataset() and example_batch() must give tensors of the same shape and dtype",
                    )
            found = self._numbers[seen] = [evaluate_number(expression, size) for expression in self.expressions]
        return found

    def _batch_size(self, given: Iterable[tuple[ValueSpec, Tensor]]) -> int:
        """Return the number of samples, as the values tell; 0 where nothing in the stage depends on it."""
        if self.fixed_batch_size is not None:
            return self.fixed_batch_size
        sizes = ((size, value) for spec, tensor in given for size, value in zip(spec.sizes, tensor.shape, strict=False))
        found = (samples_in(size, value) for size, value in sizes)
        return next((samples for samples in found if samples is not None), 0)


def _structure(spec: TreeSpec) -> object:
    """Return the structure with lists as tuples, because a DataLoader makes lists of a dataset's tuples."""
    kind = tuple if spec.type is list else spec.type
    return kind, spec.context, [_structure(child) for child in spec.children()]


def _outline(spec: TreeSpec) -> str:
    """Return the structure with a star for each leaf: ((*, *), {'mask': *}, *)."""
    return repr(spec.unflatten(["*"] * spec.num_leaves)).replace("'*'", "*")


def least_batch_size(layers: Iterable[GraphLayer]) -> int:
    """Return 2 where a BatchNorm has one value per channel and sample, of which there is no variance; else 1."""
    for node in (node for layer in layers for node in layer.nodes):
        if node.target is torch.ops.aten.batch_norm.default and node.args[TRAINING]:
            positions = node.args[0].meta["val"].shape[2:]  # type: ignore[union-attr]
            if all(isinstance(size, int) for size in positions) and math.prod(positions) == 1:
                return 2
    return 1
