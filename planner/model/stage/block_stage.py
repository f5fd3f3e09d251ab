"""Build a stage of a model that is a sequence of blocks: it runs the user's modules themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.model.capture.graph import BlockChain, LayerGraph
from planner.model.loss import loss_of
from planner.model.randomness import RandomKey, reseed
from planner.model.stage.code import compiled
from planner.model.stage.deferred_norm import defer_module, deferred_name
from planner.model.stage.parts import Boundary, Segment, Variant
from planner.model.stage.weights import add_missing, holder_of


class BlockCode:
    """The code of the stage within `boundary` of a graph of blocks; each block is compiled by itself."""

    def __init__(self, graph: LayerGraph, boundary: Boundary, variant: Variant) -> None:
        assert graph.blocks is not None
        self._graph, self._chain = graph, graph.blocks
        blocks = [
            block for layer in self._chain.layers[boundary.first : boundary.last + 1] for _, block in layer.blocks
        ]
        inside = {module for block in blocks for module in block.modules()}
        self.weights = _weights(graph, boundary, inside)
        self.numbers: dict[fx.Node, Any] = {}
        self.places: dict[str, str] = {}
        self._deferred = _defer_norms(graph, inside, self.weights) if variant.defer_batch_norm else {}
        self._calls = {block: compiled(block) if variant.compiled else block for block in blocks}

    def segment(self, part: Boundary) -> tuple[Segment, set[str]]:
        """Return the segment within `part`, and the names of the buffers that it reads."""
        names = {name for layer in part.layers for name in layer.buffers}
        names |= {norm for norm, buffer in self._deferred.items() if buffer in names}
        return _segment(self._graph, self._chain, part, self._calls), names


def _segment(
    graph: LayerGraph, chain: BlockChain, boundary: Boundary, calls: dict[nn.Module, Callable[..., Any]]
) -> Segment:
    spec = graph.batch_spec
    indices = [index for index, _ in boundary.inputs]
    received = [node.name for node in boundary.received]
    results = [node.name for node in boundary.makes]
    # Only this segment's: the chain, which the function would keep, leads to the whole model's weights.
    layers = chain.layers[boundary.first : boundary.last + 1]
    first, training, loss = boundary.first, chain.training, chain.loss
    before = chain.layers[first - 1].values if first else ()

    def run(
        _weights: nn.Module, device: torch.device, key: RandomKey, observer: Any, *values: Any
    ) -> tuple[Tensor, ...]:
        leaves: list[Any] = [None] * spec.num_leaves
        for index, value in zip(indices, values, strict=False):
            leaves[index] = value
        args, kwargs, target = spec.unflatten(leaves)
        known: dict[str, Tensor] = dict(zip(received, values[len(indices) :], strict=True))
        taken = before
        for index, layer in enumerate(layers, start=first):
            reseed(key, device, index)  # always: from outside, one cannot see whether a block draws random numbers
            # Stages in training and in evaluation run the same modules.
            for _, module in layer.blocks:
                if module.training != training:
                    module.train(training)
            if layer.takes is None:
                value = calls[layer.blocks[0][1]](*args, **kwargs)
                rest = layer.blocks[1:]
            else:
                value = layer.takes.value([known[name] for name in taken])
                rest = layer.blocks
            for _, module in rest:
                value = calls[module](value)
            made = [] if layer.gives is None else layer.gives.tensors(value, layer.blocks[-1][0])
            known.update(zip(layer.values, made, strict=True))
            if layer.has_loss:
                made = [loss_of(value, target, loss)]
                known[results[-1]] = made[0]
            taken = layer.values
            if observer is not None:
                observer.after_layer(index, made_last(made))
        return tuple(known[name] for name in results)

    return Segment(run, (), tuple(node.name for node in boundary.takes), tuple(results))


def made_last(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose backward runs first: autograd takes the highest sequence number first."""
    with_gradient = [tensor for tensor in tensors if tensor.grad_fn is not None]
    return max(with_gradient, key=lambda tensor: tensor.grad_fn._sequence_nr(), default=None)  # type: ignore[union-attr]


def _weights(graph: LayerGraph, boundary: Boundary, inside: set[nn.Module]) -> nn.Module:
    """Return a tree of bare modules under the model's names that share the registries of the modules `inside`.

    They share them because moving a stage to a device replaces buffers in the registries, and the blocks must see that.
    """
    root = nn.Module()
    for path, module in graph.model.named_modules(remove_duplicate=False):
        if module in inside:
            holder = holder_of(root, path)
            for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                holder.__dict__[registry] = getattr(module, registry)
    # Then the names that no module inside has: other names of tied weights, and weights that no block uses.
    add_missing(root, graph, [name for layer in boundary.layers for name in (*layer.parameters, *layer.buffers)])
    return root


def _defer_norms(graph: LayerGraph, inside: set[nn.Module], weights: nn.Module) -> dict[str, str]:
    """Let the BatchNorms `inside` gather statistics, in modules beside the stage's `weights`.

    Returns:
        By the name of each of these modules, a buffer whose statistics it gathers.
    """
    deferred = {}
    for path, module in graph.model.named_modules():
        norm = defer_module(path, module) if module in inside else None
        if norm is not None:
            weights.add_module(deferred_name(path), norm)
            deferred[deferred_name(path)] = norm.running.mean
    return deferred
