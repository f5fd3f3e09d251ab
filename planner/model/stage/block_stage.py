"""A stage of a model that is a sequence of blocks: it runs the user's modules themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.model.capture.block_layers import BlockLayer
from planner.model.capture.graph import LayerGraph
from planner.model.loss import loss_of
from planner.model.stage.compiling import compiled
from planner.model.stage.deferred_norm import defer_module
from planner.model.stage.parts import StageParts, exchange, stage_parts
from planner.model.stage.randomness import RandomKey, reseed
from planner.model.stage.weights import add_missing, holder_of


def block_parts(
    graph: LayerGraph,
    first: int,
    last: int,
    keep: Sequence[str],
    *,
    compile_: bool = False,
    defer_batch_norm: bool = False,
) -> StageParts:
    """The stage of layers first..last of a graph of blocks, perhaps with each block compiled by itself."""
    weights = _weights(graph, first, last)
    if defer_batch_norm:
        _defer_norms(graph, first, last, weights)
    trade = exchange(graph, first, last, keep)
    read = [(index, leaf.node.name) for index, leaf in trade.inputs]
    received = [node.name for node in trade.received]
    sent = [node.name for node in trade.sent]
    code = _code(graph, first, last, read, received, sent, compiled if compile_ else _as_it_is)
    return stage_parts(graph, graph.layers[first : last + 1], trade, weights, code)


def _code(
    graph: LayerGraph,
    first: int,
    last: int,
    read: Sequence[tuple[int, str]],
    received: Sequence[str],
    sent: Sequence[str],
    call: Callable[[nn.Module], Callable[..., Any]],
) -> Callable[..., tuple[Tensor, ...]]:
    chain = graph.blocks
    assert chain is not None
    layers = chain.layers[first : last + 1]
    spec = graph.batch_spec
    calls = {module: call(module) for layer in layers for _, module in layer.blocks}

    def run(
        _weights: nn.Module, device: torch.device, key: RandomKey, observer: Any, *values: Any
    ) -> tuple[Tensor, ...]:
        leaves: list[Any] = [None] * spec.num_leaves
        for (index, _), value in zip(read, values, strict=False):
            leaves[index] = value
        args, kwargs, target = spec.unflatten(leaves)
        known: dict[str, Tensor] = dict(zip(received, values[len(read) :], strict=True))
        for index, layer in enumerate(layers, start=first):
            reseed(key, device, index)  # whether a block draws random numbers cannot be seen from outside
            for _, module in layer.blocks:
                if module.training != chain.training:
                    module.train(chain.training)
            if layer.takes is None:
                value = calls[layer.blocks[0][1]](*args, **kwargs)
                rest = layer.blocks[1:]
            else:
                names = chain.layers[index - 1].values
                value, rest = layer.takes.value([known[name] for name in names]), layer.blocks
            for _, module in rest:
                value = calls[module](value)
            made = _results(layer, value)
            known.update(zip(layer.values, made, strict=True))
            if layer.has_loss:
                loss = loss_of(value, target, chain.loss)
                known["loss"] = loss
                made = [loss]
            if observer is not None:
                observer.after_layer(index, made_last(made))
        return tuple(known[name] for name in (*sent, *(["loss"] if layers[-1].has_loss else [])))

    return run


def _as_it_is(module: nn.Module) -> Callable[..., Any]:
    return module


def _results(layer: BlockLayer, value: Any) -> list[Tensor]:
    return [] if layer.gives is None else layer.gives.tensors(value, layer.blocks[-1][0])


def made_last(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose backward runs first: autograd takes the highest sequence number first."""
    with_gradient = [tensor for tensor in tensors if tensor.grad_fn is not None]
    return max(with_gradient, key=lambda tensor: tensor.grad_fn._sequence_nr(), default=None)  # type: ignore[union-attr]


def _weights(graph: LayerGraph, first: int, last: int) -> nn.Module:
    """A tree of bare modules under the model's names that share the registries of the blocks' modules.

    Shared, because moving a stage to a device replaces buffers in the registries, and the blocks must see that.
    """
    inside = _inside(graph, first, last)
    root = nn.Module()
    for path, module in graph.model.named_modules(remove_duplicate=False):
        if module in inside:
            holder = holder_of(root, path)
            for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                holder.__dict__[registry] = getattr(module, registry)
    # Then what no module inside has under this name: other names of tied ones, and what no block uses.
    layers = graph.layers[first : last + 1]
    add_missing(root, graph, [name for layer in layers for name in (*layer.parameters, *layer.buffers)])
    return root


def _inside(graph: LayerGraph, first: int, last: int) -> set[nn.Module]:
    chain = graph.blocks
    assert chain is not None
    return {m for layer in chain.layers[first : last + 1] for _, block in layer.blocks for m in block.modules()}


def _defer_norms(graph: LayerGraph, first: int, last: int, weights: nn.Module) -> None:
    """Let the BatchNorms of layers first..last gather statistics, in modules beside the stage's `weights`."""
    inside = _inside(graph, first, last)
    for path, module in graph.model.named_modules():
        norm = defer_module(path, module) if module in inside else None
        if norm is not None:
            weights.add_module(f"_deferred_{path.replace('.', '_')}", norm)
