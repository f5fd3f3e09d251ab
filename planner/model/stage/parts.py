"""What a stage consists of, whatever its layers are made of: generated code or the user's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec

from planner.errors import ModelFileError
from planner.model.batch import Batch
from planner.model.capture.graph import GraphLayer, Input, LayerGraph, ValueSpec
from planner.model.capture.size import samples_in
from planner.model.memory_format import channels_last
from planner.model.stage.fast_calls import Registry

LOSS = "loss"  # the key under which a stage returns the loss


@dataclass(frozen=True)
class StageParts:
    """What a stage consists of."""

    layers: tuple[GraphLayer, ...]
    weights: nn.Module
    # (weights, *registries, device, key, observer, *inputs, *received, *numbers)
    code: Callable[..., tuple[Tensor, ...]]
    batch_spec: TreeSpec
    inputs: tuple[tuple[int, ValueSpec | None], ...]  # index among the batch's leaves
    received: tuple[ValueSpec, ...]
    numbers: tuple[Any, ...]  # expressions in the batch size
    sent: tuple[ValueSpec, ...]
    results: tuple[str, ...]
    has_loss: bool
    fixed_batch_size: int | None
    autocast: torch.dtype | None
    channels_last: bool
    places: Mapping[str, str] = field(default_factory=dict)  # by name of a value in `code`, where the user makes it
    registries: tuple[Registry, ...] = ()  # parts of `weights`

    def read_batch(self, batch: Batch | None) -> list[Any]:
        if batch is None:
            raise ModelFileError("this stage reads the batch, but got none", hint="pass the batch to every stage")
        leaves, spec = batch.flatten()
        if spec != self.batch_spec:
            raise ModelFileError(
                f"a batch's (args, kwargs, target) are {_outline(spec)}, but those of example_batch() were "
                f"{_outline(self.batch_spec)}",
                hint="dataset() and example_batch() must give the model the same arguments",
            )
        if not self.channels_last:
            return [leaves[index] for index, _ in self.inputs]
        of_model = len(leaves) - spec.children()[-1].num_leaves  # the target is no image of the model's
        return [
            channels_last(leaf) if index < of_model and isinstance(leaf := leaves[index], Tensor) else leaves[index]
            for index, _ in self.inputs
        ]

    def batch_size(self, inputs: Sequence[Any], received: Sequence[Tensor]) -> int:
        if self.fixed_batch_size is not None:
            return self.fixed_batch_size
        for spec, tensor in (*zip(self.received, received, strict=True), *self._input_specs(inputs)):
            for size, value in zip(spec.sizes, tensor.shape, strict=False):
                samples = samples_in(size, value)
                if samples is not None:
                    return samples
        return 0  # the graph knows no batch

    def check(self, inputs: Sequence[Any], received: Sequence[Tensor], size: int) -> None:
        """Wrong shapes must not reach the captured operations, which trust them."""
        for spec, tensor in self._input_specs(inputs):
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape(size):
                raise ModelFileError(
                    f"batch input '{spec.name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, the model was "
                    f"captured with {spec.dtype} of shape {spec.shape(size)}",
                    hint="dataset() and example_batch() must give tensors of the same shape and dtype",
                )
        for spec, tensor in zip(self.received, received, strict=True):
            assert tensor.dtype == spec.dtype, (spec.name, tensor.dtype)
            assert tuple(tensor.shape) == spec.shape(size), (spec.name, tuple(tensor.shape))

    def _input_specs(self, inputs: Sequence[Any]) -> list[tuple[ValueSpec, Tensor]]:
        return [(spec, leaf) for (_, spec), leaf in zip(self.inputs, inputs, strict=True) if spec is not None]


def _outline(spec: TreeSpec) -> str:
    """The structure with a star for each leaf: ((*, *), {'mask': *}, *)."""
    return repr(spec.unflatten(["*"] * spec.num_leaves)).replace("'*'", "*")


def stage_parts(
    graph: LayerGraph,
    layers: tuple[GraphLayer, ...],
    trade: Exchange,
    weights: nn.Module,
    code: Callable[..., tuple[Tensor, ...]],
    numbers: Sequence[Any] = (),
    places: Mapping[str, str] | None = None,
    registries: tuple[Registry, ...] = (),
) -> StageParts:
    """The parts of the stage of `layers`, which `code` computes; it returns what is sent, and the loss last."""
    has_loss = any(graph.loss in layer.nodes for layer in layers)
    return StageParts(
        layers=layers,
        weights=weights,
        code=code,
        batch_spec=graph.batch_spec,
        inputs=tuple((index, leaf.spec) for index, leaf in trade.inputs),
        received=tuple(graph.specs[node] for node in trade.received),
        numbers=tuple(numbers),
        sent=tuple(graph.specs[node] for node in trade.sent),
        results=(*(node.name for node in trade.sent), *([LOSS] if has_loss else [])),
        has_loss=has_loss,
        fixed_batch_size=graph.batch_size,
        autocast=graph.autocast,
        channels_last=graph.channels_last,
        places=places or {},
        registries=registries,
    )


@dataclass(frozen=True)
class Exchange:
    """What the layers first..last of a graph read and hand on.

    Attributes:
        used: every node that they read.
        inputs: leaves of the batch, with their index there.
        received: from earlier stages.
        sent: to later stages, made here or received.
    """

    used: tuple[fx.Node, ...]
    inputs: tuple[tuple[int, Input], ...]
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]


def exchange(graph: LayerGraph, first: int, last: int, keep: Sequence[str]) -> Exchange:
    """What layers first..last exchange; `keep` names further values made here that count as sent."""
    layers = graph.layers[first : last + 1]
    used = dict.fromkeys(source for layer in layers for node in layer.nodes for source in node.all_input_nodes)
    inputs = [(i, leaf) for i, leaf in enumerate(graph.inputs) if leaf.node in used]
    owner = graph.owner
    received = [node for node in graph.crossing if node in used and owner[node] < first]
    made = [node for layer in layers for node in layer.nodes]
    sent = [node for node in (*received, *made) if graph.last_use(node) > last or node.name in keep]
    if not _tell_batch_size(graph.specs.get(node) for node in (*received, *(leaf.node for _, leaf in inputs))):
        # Layers that use no input may still ask how large the batch is.
        inputs += [(i, leaf) for i, leaf in enumerate(graph.inputs) if _tell_batch_size([leaf.spec])][:1]
    return Exchange(tuple(used), tuple(inputs), tuple(received), tuple(sent))


def _tell_batch_size(specs: Iterable[ValueSpec | None]) -> bool:
    return any(samples_in(size, 0) is not None for spec in specs if spec is not None for size in spec.sizes)
