"""The blocks of a model whose file names them, as operations of a stage's code: the user's own modules run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.model.loss import loss_of
from planner.model.stage.code import compiled
from planner.model.stage.deferred_norm import defer_module, deferred_name
from planner.model.stage.parts import Boundary, Variant
from planner.model.stage.weights import add_missing, holder_of


class StageBlocks:
    """The blocks within `boundary` of a graph of blocks.

    Attributes:
        weights: a tree of bare modules under the model's names that share the registries of the blocks' modules.
    """

    def __init__(self, graph: LayerGraph, boundary: Boundary, variant: Variant) -> None:
        assert graph.blocks is not None
        self._chain, self._batch_spec = graph.blocks, graph.batch_spec
        layers = self._chain.layers[boundary.first : boundary.last + 1]
        blocks = dict.fromkeys(block for layer in layers for _, block in layer.blocks)
        inside = {module for block in blocks for module in block.modules()}
        self.weights = _weights(graph, boundary, inside)
        self._calls = {block: compiled(block) if variant.compiled else block for block in blocks}
        self._gathered: dict[str, str] = {}  # by the name of each DeferredNorm, the mean that it gathers
        for path, module in graph.model.named_modules() if variant.defer_batch_norm else ():
            norm = defer_module(path, module) if module in inside else None
            if norm is not None:
                self.weights.add_module(deferred_name(path), norm)
                self._gathered[deferred_name(path)] = norm.running.mean

    def deferred_in(self, layers: Sequence[GraphLayer]) -> set[str]:
        """Return the names of the DeferredNorms that the blocks of `layers` call."""
        buffers = {name for layer in layers for name in layer.buffers}
        return {norm for norm, mean in self._gathered.items() if mean in buffers}

    def code_of(self, index: int) -> Callable[..., Any]:
        """Return what runs the blocks of a layer: from the tensors that it takes to those that it makes, or the loss.

        The first layer takes the leaves of the arguments, the last one those of the target, too, at the end.
        """
        layer, loss, training = self._chain.layers[index], self._chain.loss, self._chain.training
        # Only this layer's: the chain, which the function would keep, leads to the whole model's weights.
        blocks = [(module, self._calls[module]) for _, module in layer.blocks]
        spec = self._batch_spec
        target_spec = spec.children()[-1]

        def run(*values: Any) -> list[Tensor] | Tensor:
            end = len(values) - target_spec.num_leaves if layer.has_loss else len(values)
            # Stages in training and in evaluation run the same modules.
            for module, _ in blocks:
                if module.training != training:
                    module.train(training)
            if layer.takes is None:
                args, kwargs, _ = spec.unflatten([*values[:end], *[None] * target_spec.num_leaves])
                value = blocks[0][1](*args, **kwargs)
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
    """Return the tensor whose backward runs first: autograd takes the highest sequence number first."""
    with_gradient = [tensor for tensor in tensors if tensor.grad_fn is not None]
    return max(with_gradient, key=lambda tensor: tensor.grad_fn._sequence_nr(), default=None)  # type: ignore[union-attr]


def _weights(graph: LayerGraph, boundary: Boundary, inside: set[nn.Module]) -> nn.Module:
    """Return the tree: it shares registries because blocks must see when a stage that is moved replaces buffers."""
    root = nn.Module()
    for path, module in graph.model.named_modules(remove_duplicate=False):
        if module in inside:
            holder = holder_of(root, path)
            for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                holder.__dict__[registry] = getattr(module, registry)
    # Then the names that no module inside has: other names of tied weights, and weights that no block uses.
    add_missing(root, graph, [name for layer in boundary.layers for name in (*layer.parameters, *layer.buffers)])
    return root
