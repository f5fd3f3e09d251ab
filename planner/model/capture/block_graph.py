"""The graph of a sequence of blocks, one opaque operation per layer, built from what they returned on two batches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from planner.errors import CaptureError
from planner.model.batch import Batch
from planner.model.capture.graph import (
    BlockChain,
    BlockLayer,
    GraphLayer,
    Input,
    LayerGraph,
    Structure,
    ValueSpec,
    expanded_dimensions,
    graph_digest,
    memory_order,
    structure_of,
    tensors_of,
)
from planner.model.capture.operations import Names
from planner.model.capture.size import BATCH, Size, SizeReader
from planner.model.options import ModuleOptions
from planner.model.spec import LossFunction


def block(*_: Any) -> Any:
    """Stand for a block in the graph; a stage runs the module itself."""
    raise AssertionError("a graph of blocks is not executed")


class BlockGraph:
    """Builder of the LayerGraph of the blocks `named`."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Module]],
        batch: Batch,
        loss: LossFunction | None,
        options: ModuleOptions,
    ) -> None:
        self._model, self._named, self._batch, self._loss, self._options = model, named, batch, loss, options
        self._graph = fx.Graph()
        self._specs: dict[fx.Node, ValueSpec] = {}

    def build(self, small: list[Any], large: list[Any], joined: Sequence[tuple[int, int]]) -> LayerGraph:
        """Return the graph.

        Args:
            small: the blocks' results and the loss on the batch.
            joined: spans of blocks that share a layer.

        Raises:
            CaptureError: where something that crosses a cut cannot be sent.
        """
        leaves, batch_spec = self._batch.flatten()
        doubled = self._batch.doubled().flatten()[0]
        inputs = tuple(self._input(i, *pair) for i, pair in enumerate(zip(leaves, doubled, strict=True)))
        arguments = len(inputs) - len(tree_flatten(self._batch.target)[0])  # the targets are the last leaves
        last = len(self._named) - 1
        if structure_of(small[-2]) is None:
            joined = [*joined, (last, last + 1)]  # an output that cannot be sent stays in one layer with the loss
        names = Names(self._model, fx.GraphModule(nn.Module(), fx.Graph()))
        graph_layers: list[GraphLayer] = []
        layers: list[BlockLayer] = []
        takes, taken = None, [leaf.node for leaf in inputs[:arguments]]
        starts = self._starts(joined)
        for start, end in zip(starts, [*starts[1:], last + 2], strict=True):
            has_loss = end == last + 2
            blocks = tuple(self._named[start : min(end, last + 1)])
            if has_loss:
                taken = [*taken, *(leaf.node for leaf in inputs[arguments:])]
            node = self._graph.call_function(block, (_description(blocks), *taken))
            gives = None if has_loss else self._structure(small[end - 1], large[end - 1], blocks[-1][0])
            made = self._values(node, small[end - 1], large[end - 1]) if gives is not None else []
            layers.append(BlockLayer(blocks, takes, gives, tuple(value.name for value in made)))
            if has_loss:
                self._specs[node] = _spec(node.name, small[-1], large[-1], self._batch.size)
            graph_layers.append(self._layer(blocks, (node, *made)))
            takes, taken = gives, made
        self._graph.output(node)
        result = LayerGraph(
            model=self._model,
            module=fx.GraphModule(nn.Module(), self._graph),
            names=names,
            reader=SizeReader([]),
            layers=_with_unused(graph_layers, names),
            specs=self._specs,
            inputs=inputs,
            batch_spec=batch_spec,
            outputs=(),  # the output's values are those that the layer before the loss gives: see `blocks`
            output_spec=tree_flatten([])[1],
            loss=node,
            tied_parameters=names.tied,
            batch_size=None,
            options=self._options,
            blocks=BlockChain(tuple(layers), self._loss, self._model.training),
        )
        return replace(result, hash=graph_digest(result, result.specs))

    def _input(self, index: int, leaf: Any, doubled: Any) -> Input:
        node = self._graph.placeholder(f"batch_{index}")
        if isinstance(leaf, Tensor):
            self._specs[node] = _spec(node.name, leaf, doubled, self._batch.size)
        return Input(node, self._specs.get(node))

    def _starts(self, joined: Sequence[tuple[int, int]]) -> list[int]:
        """Return the index of each layer's first block; the loss counts as one block more."""
        inside = {index for first, last in joined for index in range(first + 1, last + 1)}
        return [index for index in range(len(self._named) + 1) if index not in inside]

    def _structure(self, small: Any, large: Any, name: str) -> Structure:
        structure = structure_of(small)
        if structure is None:
            raise CaptureError(
                f"block '{name}' returns something that cannot be sent to another stage",
                hint="return tensors, within tuples, lists and dicts, beside numbers and strings",
            )
        structure.tensors(large, name)
        return structure

    def _values(self, node: fx.Node, small: Any, large: Any) -> list[fx.Node]:
        made = []
        for index, (one, two) in enumerate(zip(tensors_of(small), tensors_of(large), strict=True)):
            value = self._graph.call_function(operator.getitem, (node, index))
            self._specs[value] = _spec(value.name, one, two, self._batch.size)
            made.append(value)
        return made

    def _layer(self, blocks: Sequence[tuple[str, nn.Module]], nodes: tuple[fx.Node, ...]) -> GraphLayer:
        tensors = {id(t) for _, module in blocks for t in (*module.parameters(), *module.buffers())}
        parameters = tuple(n for n, p in self._model.named_parameters() if id(p) in tensors)
        buffers = tuple(n for n, b in self._model.named_buffers() if id(b) in tensors)
        kinds = [type(module).__name__ for _, module in blocks] or ["loss"]
        op = "+".join(kinds if len(kinds) <= 3 else [*kinds[:3], "..."])
        return GraphLayer(blocks[0][0] if blocks else "loss", op, nodes, parameters, buffers)


def _with_unused(layers: list[GraphLayer], names: Names) -> tuple[GraphLayer, ...]:
    """Give the first layer the weights that no block uses, so that the stages' weights are all the model's."""
    used = {name for layer in layers for name in (*layer.parameters, *layer.buffers)}
    parameters, buffers = ([name for name in group if name not in used] for group in names.all())
    first = layers[0]
    first = replace(first, parameters=(*first.parameters, *parameters), buffers=(*first.buffers, *buffers))
    return (first, *layers[1:])


def _description(blocks: Sequence[tuple[str, nn.Module]]) -> str:
    """Describe blocks by the classes within them, so that graphs of different models differ."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{path} {type(part).__name__}" for path, part in module.named_modules())
        for name, module in blocks
    )


def _spec(name: str, small: Tensor, large: Tensor, samples: int) -> ValueSpec:
    """Return the spec of a value, given the value for `samples` samples and for twice as many."""
    if small.dim() != large.dim() or small.dtype != large.dtype or small.requires_grad != large.requires_grad:
        raise CaptureError(
            f"value '{name}' is {small.dtype} of {small.dim()} dimensions for {samples} samples, but {large.dtype} of "
            f"{large.dim()} for {2 * samples}",
            hint="what crosses from block to block must have the same type for every batch",
        )
    sizes = tuple(_size(*pair, samples) for pair in zip(small.shape, large.shape, strict=True))
    order, expanded = memory_order(small), expanded_dimensions(small)
    return ValueSpec(name, small.dtype, small.requires_grad, sizes, order, expanded)


def _size(small: int, large: int, samples: int) -> Size:
    """Return the linear function of the batch size that gives both sizes."""
    if small == large:
        return small
    per_sample, rest = divmod(large - small, samples)
    if rest:
        raise CaptureError(
            f"a block returns {small} elements along a dimension for {samples} samples, and {large} for {2 * samples}",
            hint="a size that depends on the data cannot cross from block to block",
        )
    return per_sample * BATCH + (small - per_sample * samples)
