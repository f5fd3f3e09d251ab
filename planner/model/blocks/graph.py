"""The graph of a sequence of blocks, with one opaque operation for each layer, of what they returned on two batches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from planner.errors import CaptureError
from planner.model.batch import Batch
from planner.model.capture.block_layers import BlockChain, BlockLayer, Structure, structure_of, tensors_of
from planner.model.capture.digest import graph_digest
from planner.model.capture.fake_run import memory_order
from planner.model.capture.graph import GraphLayer, Input, LayerGraph, ValueSpec
from planner.model.capture.names import Names
from planner.model.capture.size import BATCH, Size, SizeReader
from planner.model.loss import LossFunction
from planner.model.options import ModuleOptions


def block(*_: Any) -> Any:
    """Stands for a block in the graph; a stage runs the module itself."""
    raise AssertionError("a graph of blocks is not executed")


class BlockGraph:
    """Makes the graph of what the blocks returned."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Module]],
        batch: Batch,
        loss: LossFunction | None,
        training: bool,
        options: ModuleOptions,
    ) -> None:
        self._options = options
        self._model, self._named, self._batch, self._loss, self._training = model, named, batch, loss, training
        self._graph = fx.Graph()
        self._specs: dict[fx.Node, ValueSpec] = {}

    def graph(self, small: list[Any], large: list[Any], joined: Sequence[tuple[int, int]]) -> LayerGraph:
        """The graph.

        Args:
            small: the blocks' results and the loss on the batch.
            large: the same on one twice as large.
            joined: spans of blocks that share a layer.

        Raises:
            CaptureError: where something that must travel cannot.
        """
        leaves, batch_spec = self._batch.flatten()
        doubled = self._batch.doubled().flatten()[0]
        inputs = tuple(self._input(i, *pair) for i, pair in enumerate(zip(leaves, doubled, strict=True)))
        # The last block's output reaches the loss within one layer where it cannot travel.
        inside = structure_of(small[-2]) is None
        last = len(self._named) - 1
        starts = self._starts([*joined, (last, last + 1)] if inside else joined)
        asked = len(tree_flatten(self._batch.target)[0])
        names = Names(self._model, fx.GraphModule(nn.Module(), fx.Graph()))
        graph_layers: list[GraphLayer] = []
        layers: list[BlockLayer] = []
        takes, taken = None, [leaf.node for leaf in inputs[: len(inputs) - asked]]
        held: set[str] = set()
        for start, end in zip(starts, [*starts[1:], last + 2], strict=True):
            has_loss = end == last + 2
            blocks = tuple(self._named[start : min(end, last + 1)])
            if has_loss:
                taken = [*taken, *(leaf.node for leaf in inputs[len(inputs) - asked :])]
            node = self._graph.call_function(block, (_description(blocks), *taken))
            gives = None if has_loss else self._structure(small[end - 1], large[end - 1], blocks[-1][0])
            made = self._values(node, small[end - 1], large[end - 1]) if gives is not None else []
            layers.append(BlockLayer(blocks, takes, gives, tuple(value.name for value in made), has_loss))
            nodes = (node, *made)
            if has_loss:
                self._specs[node] = _spec(node.name, small[-1], large[-1], self._batch.size)
            graph_layers.append(self._layer(blocks, nodes, names, held))
            takes, taken = gives, made
        self._graph.output(nodes[0])
        # The last layer's own results are those that the loss alone sees.
        outputs = () if layers[-1].blocks else tuple(n for n in taken if n in self._specs and n.op != "placeholder")
        result = LayerGraph(
            model=self._model,
            module=fx.GraphModule(nn.Module(), self._graph),
            names=names,
            reader=SizeReader([]),
            layers=self._with_the_rest(graph_layers, names, held),
            specs=self._specs,
            inputs=inputs,
            batch_spec=batch_spec,
            outputs=outputs,
            output_spec=tree_flatten(list(outputs))[1],
            loss=nodes[0],
            tied_parameters=names.tied,
            batch_size=None,
            hash="",
            blocks=BlockChain(tuple(layers), self._loss, self._training),
            autocast=self._options.autocast,
            channels_last=self._options.channels_last,
        )
        return result.with_hash(graph_digest(result))

    def _input(self, index: int, leaf: Any, doubled: Any) -> Input:
        node = self._graph.placeholder(f"batch_{index}")
        if isinstance(leaf, Tensor):
            self._specs[node] = _spec(node.name, leaf, doubled, self._batch.size)
        return Input(node, self._specs.get(node))

    def _starts(self, joined: Sequence[tuple[int, int]]) -> list[int]:
        """First blocks of the layers; the loss counts as one block more."""
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

    def _layer(
        self, blocks: Sequence[tuple[str, nn.Module]], nodes: tuple[fx.Node, ...], names: Names, held: set[str]
    ) -> GraphLayer:
        tensors = {id(t) for _, module in blocks for t in (*module.parameters(), *module.buffers())}
        parameters = tuple(n for n, p in self._model.named_parameters() if id(p) in tensors)
        buffers = tuple(n for n, b in self._model.named_buffers() if id(b) in tensors)
        held.update(parameters, buffers)
        kinds = [type(module).__name__ for _, module in blocks] or ["loss"]
        op = "+".join(kinds if len(kinds) <= 3 else [*kinds[:3], "..."])
        return GraphLayer(blocks[0][0] if blocks else "loss", op, nodes, parameters, buffers)

    def _with_the_rest(self, layers: list[GraphLayer], names: Names, held: set[str]) -> tuple[GraphLayer, ...]:
        """What no block uses stays with the first, so that the stages' weights are all the model's."""
        parameters, buffers = ([name for name in all_names if name not in held] for all_names in names.all())
        first = layers[0]
        first = GraphLayer(
            first.name, first.op, first.nodes, (*first.parameters, *parameters), (*first.buffers, *buffers)
        )
        return (first, *layers[1:])


def _description(blocks: Sequence[tuple[str, nn.Module]]) -> str:
    """What tells blocks of different models apart: the classes within them."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{path} {type(part).__name__}" for path, part in module.named_modules())
        for name, module in blocks
    )


def _spec(name: str, small: Tensor, large: Tensor, samples: int) -> ValueSpec:
    """What is known of a value from its look for `samples` samples and for twice as many."""
    if small.dim() != large.dim() or small.dtype != large.dtype or small.requires_grad != large.requires_grad:
        raise CaptureError(
            f"value '{name}' is {small.dtype} of {small.dim()} dimensions for {samples} samples, but {large.dtype} of "
            f"{large.dim()} for {2 * samples}",
            hint="what crosses from block to block must be of one kind for every batch",
        )
    sizes = tuple(_size(*pair, samples) for pair in zip(small.shape, large.shape, strict=True))
    expanded = tuple(d for d, size in enumerate(small.shape) if size > 1 and small.stride(d) == 0)
    return ValueSpec(name, small.dtype, small.requires_grad, sizes, memory_order(small), expanded)


def _size(small: int, large: int, samples: int) -> Size:
    """The linear function of the batch size through both."""
    if small == large:
        return small
    per_sample, rest = divmod(large - small, samples)
    if rest:
        raise CaptureError(
            f"a block returns {small} elements along a dimension for {samples} samples, and {large} for {2 * samples}",
            hint="a size that depends on the data cannot cross from block to block",
        )
    return per_sample * BATCH + (small - per_sample * samples)
