"""A model as a sequence of modules that its file names: for what no tracer captures, such as an `if` on a tensor.

The blocks run as they are, so they may do anything; what crosses from one to the next is found by running them on the
example batch. The graph made of it has one opaque operation per block, and everything behind it works as on a
captured graph: cuts, stages, plans, schedules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from planner.errors import CaptureError
from planner.model.autocast import autocasting
from planner.model.batch import Batch
from planner.model.capture import Loss, loss_of
from planner.model.digest import graph_digest
from planner.model.failure import refuse_untrainable
from planner.model.graph import GraphLayer, Input, LayerGraph, ValueSpec
from planner.model.memory_format import lay_out
from planner.model.names import Names
from planner.model.observe import memory_order
from planner.model.options import PLAIN, StageOptions
from planner.model.size import BATCH, Size, SizeReader

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_TENSOR = object()  # a leaf that travels
_CONTRACT = "each block takes what the one before it returned, as in nn.Sequential; see docs/model-file.md"


@dataclass(frozen=True, eq=False)
class Structure:
    """What a block returns: tensors within lists, tuples and dicts, beside numbers and strings, which are constant."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    def tensors(self, value: Any, block: str) -> list[Tensor]:
        """Those in `value`.

        Raises:
            CaptureError: when it has another structure than this one.
        """
        found = structure_of(value)
        if found is None or found.spec != self.spec or found.leaves != self.leaves:
            raise CaptureError(
                f"block '{block}' returns another structure than on the example batch",
                hint="the number of tensors, and everything beside them, must be the same for every batch",
            )
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """What the next block takes."""
        rest = iter(tensors)
        return self.spec.unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves])


def structure_of(value: Any) -> Structure | None:
    """The structure of what a block returned; None where something in it cannot travel."""
    leaves, spec = tree_flatten(value)
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    return Structure(spec, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """Blocks that share a layer, the loss perhaps behind them.

    Attributes:
        blocks: with their names.
        takes: what the layer before returns; None for the first one, which takes the batch.
        gives: what the layer after takes; None for the last one.
        values: names of the tensors in `gives`.
        has_loss: whether it computes the loss.
    """

    blocks: tuple[tuple[str, nn.Module], ...]
    takes: Structure | None
    gives: Structure | None
    values: tuple[str, ...]
    has_loss: bool


@dataclass(frozen=True)
class BlockChain:
    """What the layers of a graph of blocks run; `training` is the mode that they are put into."""

    layers: tuple[BlockLayer, ...]
    loss: Loss | None
    training: bool


def capture_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batch: Batch,
    loss: Loss | None,
    *,
    training: bool = True,
    options: StageOptions = PLAIN,
) -> LayerGraph:
    """The graph of `blocks`, each a layer, with the loss behind them.

    They are run on `batch`, and on twice as many samples to see which sizes follow the batch; weights, buffers and
    random state are left as they were. A block that changes its input in place joins the block that made it, and blocks
    that share a module with buffers join each other.

    Args:
        model: what the blocks are parts of; its loss must be theirs.
        blocks: the first takes the batch's arguments, each other one what the one before returned, the loss (or the
            output that has it) comes from the last.
        batch: example.
        loss: as for `capture`.
        training: mode of the modules.
        options: as for `capture`.

    Raises:
        CaptureError: when the blocks fail, compute something else than the model, or exchange what cannot travel.
    """
    refuse_untrainable(model)
    example = batch.doubled() if batch.size == 1 else batch
    if options.channels_last:
        lay_out(model)
        example = example.channels_last()
    model.train(training)
    named = _named(model, blocks)
    with _kept(model), autocasting(example.device_type, options.autocast):
        joined = [*_joined_by_writes(named, example), *_joined_by_buffers(named)]
        small, large = (_run(named, sample, loss) for sample in (example, example.doubled()))
        _check_loss(model, example, loss, small[-1])
    return _Assembler(model, named, example, loss, training, options).graph(small, large, joined)


def _named(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    if not isinstance(blocks, (list, tuple, nn.ModuleList, nn.Sequential)) or not len(blocks):
        raise CaptureError(
            f"blocks(model) returned a {type(blocks).__name__}, not a list of modules", hint="return a list of modules"
        )
    paths = {module: path for path, module in model.named_modules() if path}
    named: list[tuple[str, nn.Module]] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise CaptureError(
                f"block {index} of blocks(model) is a {type(block).__name__}, not a module",
                hint="write an nn.Module that does in its forward what happens between two modules",
            )
        _check_owned(index, block, model)
        name = base = paths.get(block, f"blocks.{index}")
        number = 2
        while any(name == other for other, _ in named):
            name, number = f"{base}_{number}", number + 1
        named.append((name, block))
    return named


def _check_owned(index: int, block: nn.Module, model: nn.Module) -> None:
    modules = set(model.modules())
    parameters = {id(parameter) for parameter in model.parameters()}
    for path, part in block.named_modules():
        if part in modules:
            continue
        foreign = [name for name, p in part._parameters.items() if p is not None and id(p) not in parameters]
        # The same buffer in a second module would be left behind when the stage moves to a device.
        foreign += [name for name, buffer in part._buffers.items() if buffer is not None]
        if foreign:
            name = f"{path}.{foreign[0]}" if path else foreign[0]
            raise CaptureError(
                f"block {index} of blocks(model) has a parameter or buffer of its own, '{name}'",
                hint="make all parameters and buffers in build_model(); blocks() only groups the modules",
            )


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Put buffers and random state back afterwards."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def _call(name: str, block: nn.Module, value: Any, batch: Batch | None) -> Any:
    """Run a block: on the batch's arguments where one is given."""
    try:
        return block(*batch.args, **batch.kwargs) if batch is not None else block(value)
    except Exception as cause:  # whatever the user's forward raises
        reason = (str(cause).strip().splitlines() or [""])[0]
        raise CaptureError(f"block '{name}' fails: {type(cause).__name__}: {reason}", hint=_CONTRACT) from cause


def _joined_by_writes(named: Sequence[tuple[str, nn.Module]], batch: Batch) -> list[tuple[int, int]]:
    """Spans of blocks of which the last writes into memory that the first made."""
    spans: list[tuple[int, int]] = []
    makers: dict[int, int] = {}
    alive: list[Any] = []  # memory that is freed would be given to another value
    value: Any = None
    with torch.random.fork_rng():
        for index, (name, block) in enumerate(named):
            taken = _tensors(value)
            versions = [tensor._version for tensor in taken]
            value = _call(name, block, value, None if index else batch)
            for tensor, version in zip(taken, versions, strict=True):
                if tensor._version != version:
                    spans.append((makers[_storage(tensor)], index))
            for tensor in _tensors(value):
                makers.setdefault(_storage(tensor), index)
            alive.append(value)
    return spans


def _joined_by_buffers(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[int, int]]:
    """Spans of blocks that share a buffer: its state must stay in one stage."""
    users: dict[int, list[int]] = {}
    for index, (_, block) in enumerate(named):
        for buffer in block.buffers():
            users.setdefault(id(buffer), []).append(index)
    return [(indices[0], indices[-1]) for indices in users.values()]


def _run(named: Sequence[tuple[str, nn.Module]], batch: Batch, loss: Loss | None) -> list[Any]:
    """What each block returns, and the loss."""
    results: list[Any] = []
    torch.manual_seed(0)
    for index, (name, block) in enumerate(named):
        results.append(_call(name, block, results[-1] if index else None, None if index else batch))
    return [*results, loss_of(results[-1], batch.target, loss)]


def _check_loss(model: nn.Module, batch: Batch, loss: Loss | None, found: Tensor) -> None:
    if found.dim() or not found.requires_grad:
        what = "does not depend on the model's parameters" if not found.dim() else "is not a single number"
        raise CaptureError(
            f"the loss {what}", hint="loss(output, target) must return a 0-dimensional tensor made from the output"
        )
    with torch.no_grad():
        torch.manual_seed(0)
        expected = loss_of(model(*batch.args, **batch.kwargs), batch.target, loss)
    if not torch.allclose(found.detach(), expected, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise CaptureError(
            f"the blocks compute another loss than the model on example_batch(): {found.item():.6g} instead of "
            f"{expected.item():.6g}",
            hint=_CONTRACT,
        )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def block(*_: Any) -> Any:
    """Stands for a block in the graph; a stage runs the module itself."""
    raise AssertionError("a graph of blocks is not executed")


class _Assembler:
    """Makes the graph of what the blocks returned."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Module]],
        batch: Batch,
        loss: Loss | None,
        training: bool,
        options: StageOptions,
    ) -> None:
        self._options = options
        self._model, self._named, self._batch, self._loss, self._training = model, named, batch, loss, training
        self._graph = fx.Graph()
        self._specs: dict[fx.Node, ValueSpec] = {}

    def graph(self, small: list[Any], large: list[Any], joined: Sequence[tuple[int, int]]) -> LayerGraph:
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
        for index, (one, two) in enumerate(zip(_tensors(small), _tensors(large), strict=True)):
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
