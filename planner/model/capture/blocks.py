"""Capture a model as a sequence of modules that its file names: for what no tracer captures, such as `if` on a tensor.

The blocks run as they are, so they may do anything. Running them on the example batch shows what crosses from one to
the next, and which must share a layer. The resulting graph has one opaque operation per block, so cuts, stages, plans
and schedules work as on a traced graph.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from planner.errors import CaptureError, ModelFileError, PlannerError, first_line, reason_of
from planner.model.batch import Batch
from planner.model.capture.failure import decides_by_values, refuse_untrainable
from planner.model.capture.fake import fake_batch, fake_device, fake_modules, pretended
from planner.model.capture.graph import (
    BlockChain,
    BlockLayer,
    GraphLayer,
    Input,
    LayerGraph,
    ValueSpec,
    expanded_dimensions,
    graph_digest,
    memory_order,
    structure_of,
    tensors_of,
)
from planner.model.capture.layers import adopt_unused
from planner.model.capture.operations import Names
from planner.model.capture.size import BATCH, Size, SizeReader
from planner.model.loss import loss_of
from planner.model.options import PLAIN, ModuleOptions, autocasting, lay_out
from planner.model.randomness import keep_state
from planner.model.spec import LossFunction
from planner.runtime import runtime_of

_CONTRACT = "each block takes what the one before it returned, as in nn.Sequential; see docs/guides/own-model.md"
_Named = Sequence[tuple[str, nn.Module]]
_Span = tuple[int, int]


@dataclass(frozen=True)
class _Results:
    """What blocks return, and the loss, on a batch and on twice as many samples; spans of blocks that share a layer."""

    small: list[Any]
    large: list[Any]
    joined: list[_Span]


def capture_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batch: Batch,
    loss: LossFunction | None,
    *,
    options: ModuleOptions = PLAIN,
    values: bool = True,
) -> LayerGraph:
    """Return the graph of `blocks`, each a layer, followed by the loss.

    The blocks are run on `batch`, and on twice as many samples to see which sizes depend on the batch; weights, buffers
    and random state are left as they were. A block that changes its input in place shares a layer with the block that
    made it, and so do blocks that share a buffer.

    Args:
        model: with the blocks as parts, in training or evaluation mode; it must compute the same loss as they do.
        blocks: the first takes the batch's arguments, each other one takes what the one before it returned, and the
            last returns the model's output.
        batch: example.
        values: whether the weights have values. Without, the blocks run on tensors without data: nothing is computed,
            and that the loss is the model's is not checked.

    Raises:
        CaptureError: when the blocks fail, compute something else than the model, or exchange what cannot travel.
        ModelFileError: without values, when a block decides by them.
    """
    refuse_untrainable(model)
    example = batch.doubled() if batch.size == 1 else batch
    if options.channels_last:
        lay_out(model)
        example = example.channels_last()
    named = _named(model, blocks)
    build = partial(_graph, model, named, example, loss, options)
    with keep_state(model):
        with autocasting(example.device_type, options.autocast):
            if values:
                results = _run(named, example, loss)
                _check_loss(model, example, loss, results.small[-1])
            else:
                results = _run_without_values(named, example, loss)
        graph = build(results)
        if options.device == "cpu" or options.autocast is None:
            return graph
        # Autocast on a GPU leaves other dtypes. The hash is the same for each device that the model may train on.
        return replace(build(_run_on_gpu(named, example, loss, options.device, options.autocast)), hash=graph.hash)


def _run(named: _Named, example: Batch, loss: LossFunction | None) -> _Results:
    small, joined = _run_blocks(named, example, loss)
    large, _ = _run_blocks(named, example.doubled(), loss)
    users: dict[int, list[int]] = {}
    for index, (_, block) in enumerate(named):
        for buffer in block.buffers():  # its state must stay in one stage
            users.setdefault(id(buffer), []).append(index)
    return _Results(small, large, [*joined, *((indices[0], indices[-1]) for indices in users.values())])


def _run_blocks(named: _Named, batch: Batch, loss: LossFunction | None) -> tuple[list[Any], list[_Span]]:
    """Return what each block returns, and the loss; and from each block that made memory to those that write it."""
    results: list[Any] = []  # kept, for freed memory would be given to another value, and look shared
    spans: list[_Span] = []
    makers: dict[int, int] = {}
    torch.manual_seed(0)
    for index, (name, block) in enumerate(named):
        taken = tensors_of(results[-1]) if index else []
        versions = [tensor._version for tensor in taken]  # PyTorch counts in-place changes here
        try:
            results.append(block(results[-1]) if index else block(*batch.args, **batch.kwargs))
        except Exception as cause:  # whatever the user's forward raises
            raise CaptureError(f"block '{name}' fails: {reason_of(cause)}", hint=_CONTRACT) from cause
        for tensor, version in zip(taken, versions, strict=True):
            if tensor._version != version:
                spans.append((makers[_storage(tensor)], index))
        for tensor in tensors_of(results[-1]):
            makers.setdefault(_storage(tensor), index)
    return [*results, loss_of(results[-1], batch.target, loss)], spans


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _check_loss(model: nn.Module, batch: Batch, loss: LossFunction | None, found: Tensor) -> None:
    """Check that the blocks' loss is a number that can be trained, and equals the model's.

    Raises:
        CaptureError: otherwise.
    """
    if found.dim() or not found.requires_grad:
        what = "does not depend on the model's parameters" if not found.dim() else "is not a single number"
        raise CaptureError(
            f"the loss {what}", hint="loss(output, target) must return a 0-dimensional tensor made from the output"
        )
    torch.manual_seed(0)
    # With gradients, which a forward may itself ask for, as of its input.
    expected = loss_of(model(*batch.args, **batch.kwargs), batch.target, loss).detach()
    if not torch.allclose(found.detach(), expected, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise CaptureError(
            f"the blocks compute another loss than the model on example_batch(): {found.item():.6g} instead of "
            f"{expected.item():.6g}",
            hint=_CONTRACT,
        )


def _run_without_values(
    named: _Named,
    example: Batch,
    loss: LossFunction | None,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
) -> _Results:
    """Run copies of the blocks on tensors without data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        fakes = fake_modules([block for _, block in named], mode, device)
        with mode:
            renamed = [(name, fake) for (name, _), fake in zip(named, fakes, strict=True)]
            return _run(renamed, fake_batch(example, device), loss)
    except (PlannerError, RuntimeError) as error:
        if not decides_by_values(error):
            raise
        cause = error.__cause__ or error
        raise ModelFileError(
            f"blocks(model) decide by values, and so need their weights to be captured: {first_line(cause)}",
            hint="train without `defer_weights`",
        ) from error


def _run_on_gpu(named: _Named, example: Batch, loss: LossFunction | None, kind: str, autocast: torch.dtype) -> _Results:
    """Run copies of the blocks on a kind of GPU under autocast; without data where they need none."""
    device = fake_device(kind)
    try:
        with pretended(kind), autocasting(kind, autocast):
            return _run_without_values(named, example, loss, device)
    except ModelFileError as error:
        if not runtime_of(kind).available():
            raise CaptureError(
                f"blocks(model) decide by values, so their dtypes under autocast on {kind} cannot be told without a "
                "GPU",
                hint="profile in float32, or on a machine with a GPU",
            ) from error
    copies = copy.deepcopy([block for _, block in named])  # together, so that what they share stays shared
    moved = [(name, block.to(device)) for (name, _), block in zip(named, copies, strict=True)]
    with autocasting(kind, autocast):
        return _run(moved, example.to(device), loss)


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
        # Refused even if the model has it too: moving the stage to a device would leave this module's buffer behind.
        foreign += [name for name, buffer in part._buffers.items() if buffer is not None]
        if foreign:
            name = f"{path}.{foreign[0]}" if path else foreign[0]
            raise CaptureError(
                f"block {index} of blocks(model) has a parameter or buffer of its own, '{name}'",
                hint="make all parameters and buffers in build_model(); blocks() only groups the modules",
            )


def block(*_: Any) -> Any:
    """Stand for blocks in the graph; a stage runs the modules themselves."""
    raise AssertionError("a graph of blocks is not executed")


def _graph(
    model: nn.Module, named: _Named, batch: Batch, loss: LossFunction | None, options: ModuleOptions, run: _Results
) -> LayerGraph:
    """Return the graph of the blocks, one opaque operation per layer.

    Raises:
        CaptureError: where something that crosses a cut cannot be sent.
    """
    code = fx.Graph()
    specs: dict[fx.Node, ValueSpec] = {}

    def value(node: fx.Node, small: Any, large: Any) -> fx.Node:
        if isinstance(small, Tensor):
            specs[node] = _spec(node.name, small, large, batch.size)
        return node

    leaves, batch_spec = batch.flatten()
    pairs = enumerate(zip(leaves, batch.doubled().flatten()[0], strict=True))
    inputs = [value(code.placeholder(f"batch_{index}"), *pair) for index, pair in pairs]
    arguments = len(inputs) - batch_spec.children()[-1].num_leaves  # the targets are the last leaves
    end = len(named)
    # An output that cannot be sent stays in one layer with the loss, which counts as one block more.
    spans = [*run.joined, *([(end - 1, end)] if structure_of(run.small[-2]) is None else [])]
    inside = {index for first, last in spans for index in range(first + 1, last + 1)}
    starts = [index for index in range(end + 1) if index not in inside]
    graph_layers: list[GraphLayer] = []
    layers: list[BlockLayer] = []
    takes, taken = None, inputs[:arguments]
    for start, after in zip(starts, [*starts[1:], end + 1], strict=True):
        blocks = tuple(named[start:after])
        has_loss = after > end
        taken = [*taken, *(inputs[arguments:] if has_loss else ())]
        node = code.call_function(block, (_description(blocks), *taken))
        small, large = run.small[after - 1], run.large[after - 1]
        gives, made = None, list[fx.Node]()
        if has_loss:
            value(node, small, large)
        else:
            gives = structure_of(small)
            if gives is None:
                raise CaptureError(
                    f"block '{blocks[-1][0]}' returns something that cannot be sent to another stage",
                    hint="return tensors, within tuples, lists and dicts, beside numbers and strings",
                )
            tensors = zip(tensors_of(small), gives.tensors(large, blocks[-1][0]), strict=True)
            for index, pair in enumerate(tensors):
                made.append(value(code.call_function(operator.getitem, (node, index)), *pair))
        layers.append(BlockLayer(blocks, takes, gives, tuple(each.name for each in made)))
        graph_layers.append(_layer(model, blocks, (node, *made)))
        takes, taken = gives, made
    code.output(node)
    names = Names(model, fx.GraphModule(nn.Module(), fx.Graph()))
    graph = LayerGraph(
        model=model,
        module=fx.GraphModule(nn.Module(), code),
        names=names,
        reader=SizeReader([]),
        layers=adopt_unused(graph_layers, names),
        specs=specs,
        inputs=tuple(Input(node, specs.get(node)) for node in inputs),
        batch_spec=batch_spec,
        outputs=(),  # the output's values are those that the layer before the loss gives: see `blocks`
        output_spec=tree_flatten([])[1],
        loss=node,
        tied_parameters=names.tied,
        batch_size=None,
        options=options,
        written=frozenset(),  # no node says what blocks write
        blocks=BlockChain(tuple(layers), loss, model.training),
    )
    return replace(graph, hash=graph_digest(graph, specs))


def _layer(model: nn.Module, blocks: _Named, nodes: tuple[fx.Node, ...]) -> GraphLayer:
    tensors = {id(t) for _, module in blocks for t in (*module.parameters(), *module.buffers())}
    parameters = tuple(n for n, p in model.named_parameters() if id(p) in tensors)
    buffers = tuple(n for n, b in model.named_buffers() if id(b) in tensors)
    kinds = [type(module).__name__ for _, module in blocks] or ["loss"]
    op = "+".join(kinds if len(kinds) <= 3 else [*kinds[:3], "..."])
    return GraphLayer(blocks[0][0] if blocks else "loss", op, nodes, parameters, buffers)


def _description(blocks: _Named) -> str:
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
