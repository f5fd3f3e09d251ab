"""Capture a model as a sequence of modules that its file names: for what no tracer captures, such
as `if` on a tensor.

The blocks run as they are. The graph has one opaque operation per block, so all else works as on a
traced one.
"""

import copy
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.errors import CaptureError, ModelFileError, PlannerError, first_line, reason_of
from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.capture.failure import decides_by_values, refuse_loss, refuse_untrainable
from planner.model.capture.fake import CPU, device_rules, fake_batch, fake_modules
from planner.model.capture.foreign import RefuseForeignWeights
from planner.model.capture.graph import (
    LOSS,
    BlockChain,
    BlockLayer,
    GraphLayer,
    LayerGraph,
    Structure,
    ValueSpec,
    graph_digest,
    structure_of,
    tensors_of,
)
from planner.model.capture.hooks import refuse_hooks
from planner.model.capture.layers import adopt_unused
from planner.model.capture.operations import Names
from planner.model.capture.parameters import refuse_changed_parameters
from planner.model.capture.size import BATCH, SizeReader
from planner.model.loss import loss_of
from planner.model.modes import modes_of
from planner.model.options import PLAIN, LossFunction, ModuleOptions, autocasting
from planner.model.randomness import keep_state
from planner.model.torch_private import FakeTensorMode, tree_flatten
from planner.runtime import address_of, runtime_of

_CONTRACT = (
    "each block takes what the one before it returned, as in nn.Sequential; see "
    "docs/guides/own-model.md"
)
_Named = Sequence[tuple[str, nn.Module]]
_Span = tuple[int, int]


@dataclass(frozen=True)
class _Results:
    """What blocks return, and the loss, on a batch and on twice as many samples; spans of blocks
    that share a layer.
    """

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

    The blocks are run on `batch`, and on twice as many samples to see which sizes depend on the
    batch; weights, buffers and random state are left as they were. A block that changes its input
    in place shares a layer with the block that made it, and so do blocks that share a buffer.
    Without `values`, the weights have none: the blocks run on tensors without data, and that the
    loss is the model's is not checked. Raise CaptureError when the blocks fail, compute something
    else than the model, or exchange what cannot travel; ModelFileError when one decides by values
    that are not there.
    """
    refuse_untrainable(model)
    example = batch.doubled() if batch.size == 1 else batch
    options.prepare(model)
    example = example.prepared(options)
    named = _named(model, blocks)
    refuse_hooks(model, blocks)
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

        # Autocast on a GPU leaves other dtypes. The hash is the same for each device that the model
        # may train on.
        on_gpu = _run_on_gpu(named, example, loss, options.device, options.autocast)
        return replace(build(on_gpu), hash=graph.hash)


def _check_loss(
    model: nn.Module, example: Batch, loss: LossFunction | None, computed: Tensor
) -> None:
    """Raise CaptureError unless the loss that blocks computed is the model's."""
    refuse_loss(computed.dim(), computed.requires_grad)
    # With gradients, which a forward may itself ask for, as of its input.
    with _same_start([model]), RefuseForeignWeights(model):
        output = model(*example.args, **example.kwargs)
        expected = loss_of(output, example.target, loss).detach()

    if not torch.allclose(computed.detach(), expected, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise CaptureError(
            "the blocks compute another loss than the model on example_batch(): "
            f"{computed.item():.6g} instead of {expected.item():.6g}",
            hint=_CONTRACT,
        )


def _run(named: _Named, example: Batch, loss: LossFunction | None) -> _Results:
    modules = [block for _, block in named]
    with _same_start(modules):
        small, joined = _run_blocks(named, example, loss)
    with _same_start(modules):
        large, _ = _run_blocks(named, example.doubled(), loss)

    users: dict[int, list[int]] = {}
    for index, (_, block) in enumerate(named):
        for buffer in block.buffers():  # its state must stay in one stage
            users.setdefault(id(buffer), []).append(index)

    return _Results(
        small, large, [*joined, *((indices[0], indices[-1]) for indices in users.values())]
    )


@contextmanager
def _same_start(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let each of the runs that are compared begin with the same buffers and random numbers."""
    with keep_state(nn.ModuleList(modules)):
        torch.manual_seed(0)
        yield


def _run_blocks(
    named: _Named, batch: Batch, loss: LossFunction | None
) -> tuple[list[Any], list[_Span]]:
    """Return what each block returns, and the loss; and from each block that made memory to those
    that write it.
    """
    # kept, for freed memory would be given to another value, and look shared
    results: list[Any] = []
    spans: list[_Span] = []
    makers: dict[int, int] = {}
    for index, (name, block) in enumerate(named):
        taken = tensors_of(results[-1]) if results else []
        versions = [tensor._version for tensor in taken]  # PyTorch counts in-place changes here
        try:
            if results:
                made = block(results[-1])
            else:
                made = block(*batch.args, **batch.kwargs)
        except Exception as cause:  # whatever the user's forward raises
            raise CaptureError(
                f"block '{name}' fails: {reason_of(cause)}", hint=_CONTRACT
            ) from cause

        for tensor, version in zip(taken, versions, strict=True):
            if tensor._version != version:
                spans.append((makers[address_of(tensor)], index))
        for tensor in tensors_of(made):
            makers.setdefault(address_of(tensor), index)
        results.append(made)

    return [*results, loss_of(results[-1], batch.target, loss)], spans


def _run_without_values(
    named: _Named, example: Batch, loss: LossFunction | None, device: torch.device = CPU
) -> _Results:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        fakes = fake_modules([block for _, block in named], mode, device)
        renamed = [(name, fake) for (name, _), fake in zip(named, fakes, strict=True)]
        with mode, ExitStack() as contexts:
            for name, fake in renamed:
                contexts.enter_context(refuse_changed_parameters(fake, f"{name}."))
            return _run(renamed, fake_batch(example, device), loss)
    except (PlannerError, RuntimeError) as error:
        if not decides_by_values(error):
            raise
        raise ModelFileError(
            "blocks(model) decide by values, and so need weights and the device to be captured: "
            f"{first_line(error.__cause__ or error)}",
            hint="train without `defer_weights`; profile in float32, or on a machine with a GPU",
        ) from error


def _run_on_gpu(
    named: _Named, example: Batch, loss: LossFunction | None, kind: str, autocast: torch.dtype
) -> _Results:
    """Run copies of the blocks on a kind of GPU under autocast; without data where they
    need none.
    """
    try:
        with device_rules(kind) as device, autocasting(device.type, autocast):
            return _run_without_values(named, example, loss, device)
    except ModelFileError:
        if not runtime_of(kind).available():
            raise

    # together, so that what they share stays shared
    copies = copy.deepcopy([block for _, block in named])
    moved = [(name, block.to(device)) for (name, _), block in zip(named, copies, strict=True)]
    with autocasting(kind, autocast):
        return _run(moved, example.to(device), loss)


def _named(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the blocks with unique names: their paths in the model, where they have one."""
    is_list = isinstance(blocks, (list, tuple, nn.ModuleList, nn.Sequential)) and len(blocks)
    if not is_list or not all(isinstance(block, nn.Module) for block in blocks):
        raise CaptureError(
            f"blocks(model) returned a {type(blocks).__name__} that is not a list of modules",
            hint="return a list of modules; write one that does in its forward what happens "
            "between two modules",
        )

    paths = {module: path for path, module in model.named_modules()}
    parameters = {id(parameter) for parameter in model.parameters()}
    named: dict[str, nn.Module] = {}
    for index, block in enumerate(blocks):
        for part in (each for each in block.modules() if each not in paths):
            # A buffer is refused even if the model has it too: moving the stage would leave this
            # module's behind.
            foreign = [
                name
                for name, p in part._parameters.items()
                if p is not None and id(p) not in parameters
            ]
            foreign += [name for name, buffer in part._buffers.items() if buffer is not None]
            if foreign:
                raise CaptureError(
                    f"block {index} of blocks(model) has a parameter or buffer of its own, "
                    f"'{foreign[0]}'",
                    hint="make all parameters and buffers in build_model(); blocks() only groups "
                    "the modules",
                )
        name = base = paths.get(block) or f"blocks.{index}"
        number = 2
        while name in named:
            name = f"{base}_{number}"
            number += 1
        named[name] = block

    return list(named.items())


def block(*_: Any) -> Any:
    """Stand for blocks in the graph; a stage runs the modules themselves."""
    raise AssertionError("a graph of blocks is not executed")


class _GraphWriter:
    """Writes the graph of blocks: a call for each layer, and an item for each tensor that it
    returns.
    """

    def __init__(self, batch: Batch) -> None:
        self.code = fx.Graph()
        self.specs: dict[fx.Node, ValueSpec] = {}
        self._samples = batch.size

    def specify(self, node: fx.Node, small: Any, large: Any) -> None:
        """Note the spec of a value, given the value for the batch and for twice as many samples;
        what is no tensor has none.
        """
        if isinstance(small, Tensor):
            self.specs[node] = _spec(node.name, small, large, self._samples)

    def inputs(self, small: Sequence[Any], large: Sequence[Any]) -> list[fx.Node]:
        """Write a placeholder for each leaf of the batch."""
        nodes = []
        for index, (one, two) in enumerate(zip(small, large, strict=True)):
            node = self.code.placeholder(f"batch_{index}")
            self.specify(node, one, two)
            nodes.append(node)
        return nodes

    def call(self, blocks: _Named, taken: Sequence[fx.Node]) -> fx.Node:
        """Write the call of some blocks, or of the loss."""
        return self.code.call_function(block, (_description(blocks), *taken))

    def items(
        self, node: fx.Node, small: Sequence[Tensor], large: Sequence[Tensor]
    ) -> list[fx.Node]:
        """Write an item for each tensor that a call returns."""
        nodes = []
        for index, (one, two) in enumerate(zip(small, large, strict=True)):
            item = self.code.call_function(operator.getitem, (node, index))
            self.specify(item, one, two)
            nodes.append(item)
        return nodes


def _graph(
    model: nn.Module,
    named: _Named,
    batch: Batch,
    loss: LossFunction | None,
    options: ModuleOptions,
    run: _Results,
) -> LayerGraph:
    writer = _GraphWriter(batch)
    leaves, batch_spec = batch.flatten()
    inputs = writer.inputs(leaves, batch.doubled().flatten()[0])
    targets = batch_spec.children()[-1].num_leaves  # the last leaves
    taken = inputs[: len(inputs) - targets]
    # of the model, unless its last block shares a layer with the loss
    outputs, output_spec = tree_flatten([])

    end = len(named)
    starts = _starts(run, end)
    graph_layers: list[GraphLayer] = []
    layers: list[BlockLayer] = []
    takes = None
    for start, after in zip(starts, [*starts[1:], end + 1], strict=True):
        blocks = tuple(named[start:after])
        small = run.small[after - 1]
        large = run.large[after - 1]
        gives = None
        made: list[fx.Node] = []
        if after > end:
            node = writer.call(blocks, [*taken, *inputs[len(inputs) - targets :]])
            writer.specify(node, small, large)
        else:
            node = writer.call(blocks, taken)
            gives = _structure(small, blocks)
            made = writer.items(node, tensors_of(small), gives.tensors(large, blocks[-1][0]))
        if after == end:
            assert gives is not None
            outputs, output_spec = tree_flatten(gives.value(made))

        modes = tuple(training for _, training in modes_of(module for _, module in blocks))
        layers.append(BlockLayer(blocks, takes, gives, modes))
        graph_layers.append(_graph_layer(model, blocks, (node, *made)))
        takes = gives
        taken = made

    code = writer.code
    specs = writer.specs
    code.output(node)
    names = Names(model, fx.GraphModule(nn.Module(), fx.Graph()))
    graph = LayerGraph(
        model=model,
        module=fx.GraphModule(nn.Module(), code),
        names=names,
        reader=SizeReader([]),
        layers=adopt_unused(graph_layers, names),
        specs=specs,
        inputs=tuple(inputs),
        batch_spec=batch_spec,
        outputs=tuple(outputs),
        output_spec=output_spec,
        loss=node,
        tied_parameters=names.tied,
        batch_size=None,
        options=options,
        written=frozenset(),  # no node says what blocks write
        blocks=BlockChain(tuple(layers), loss),
    )
    return replace(graph, hash=graph_digest(graph, specs))


def _starts(run: _Results, end: int) -> list[int]:
    """Return the blocks with which layers begin; the loss counts as block number `end`."""
    joined = list(run.joined)
    # An output that cannot be sent stays in one layer with the loss.
    if structure_of(run.small[-2]) is None:
        joined.append((end - 1, end))
    inside = {index for first, last in joined for index in range(first + 1, last + 1)}
    return [index for index in range(end + 1) if index not in inside]


def _structure(output: Any, blocks: _Named) -> Structure:
    """Return the structure of what some blocks return; raise CaptureError if it cannot be sent."""
    structure = structure_of(output)
    if structure is None:
        raise CaptureError(
            f"block '{blocks[-1][0]}' returns something that cannot be sent to another stage",
            hint="return tensors, numbers and strings, within tuples, lists and dicts",
        )
    return structure


def _description(blocks: _Named) -> str:
    """Return the classes within blocks: the graphs of different models differ by them."""
    described = []
    for name, module in blocks:
        parts = [f"{path} {type(part).__name__}" for path, part in module.named_modules()]
        described.append(f"{name}: {', '.join(parts)}")
    return "; ".join(described)


def _graph_layer(model: nn.Module, blocks: _Named, nodes: tuple[fx.Node, ...]) -> GraphLayer:
    """Return the layer of some blocks, or of the loss where there are none."""
    modules = [module for _, module in blocks]
    parameters = _names_of(model.named_parameters(), [m.parameters() for m in modules])
    buffers = _names_of(model.named_buffers(), [m.buffers() for m in modules])
    if not blocks:
        return GraphLayer(LOSS, "loss", nodes, parameters, buffers)

    name, _ = blocks[0]
    kinds = [type(module).__name__ for module in modules]
    if len(kinds) > 3:
        kinds = [*kinds[:3], "..."]
    return GraphLayer(name, "+".join(kinds), nodes, parameters, buffers)


def _names_of(
    named: Iterable[tuple[str, Tensor]],
    members: Iterable[Iterable[Tensor]],
) -> tuple[str, ...]:
    """Return the names of the tensors that are among the members of some modules."""
    identities = {id(tensor) for tensors in members for tensor in tensors}
    return tuple(name for name, tensor in named if id(tensor) in identities)


def _spec(name: str, small: Tensor, large: Tensor, samples: int) -> ValueSpec:
    """Return the spec of a value, given the value for `samples` samples and for twice as many."""
    sizes = []
    alike = (
        small.dim() == large.dim()
        and small.dtype == large.dtype
        and small.requires_grad == large.requires_grad
    )
    for one, two in zip(small.shape, large.shape, strict=False):
        per_sample, rest = divmod(two - one, samples)
        alike = alike and not rest
        # The linear function of the batch size that gives both sizes.
        sizes.append(one if one == two else per_sample * BATCH + (one - per_sample * samples))

    if not alike:
        raise CaptureError(
            f"value '{name}' is {small.dtype} of shape {tuple(small.shape)} for {samples} "
            f"samples, but {large.dtype} "
            f"of {tuple(large.shape)} for {2 * samples}",
            hint="what crosses from block to block must have the same type for every batch, and "
            "no size that depends "
            "on the data",
        )

    return ValueSpec.of(name, small, sizes)
