"""Capture a model and its loss as a LayerGraph: through torch.export with a dynamic batch dimension, or as blocks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, export
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from planner.errors import CaptureError, PlannerError
from planner.model.batch import Batch
from planner.model.capture.blocks import capture_blocks
from planner.model.capture.failure import (
    capture_failure,
    is_of_tracer,
    refuse_assignments,
    refuse_custom_autograd,
    refuse_kept_tensors,
    refuse_untrainable,
    silent_tracer,
)
from planner.model.capture.fake import TensorFacts, fake_run
from planner.model.capture.graph import LOSS, Input, LayerGraph, ValueSpec, graph_digest
from planner.model.capture.layers import group_layers
from planner.model.capture.operations import MODEL, Names, is_check
from planner.model.capture.size import SizeReader, is_symbolic
from planner.model.deferred_weights import allocate_buffers, is_deferred, without_storage
from planner.model.loss import loss_of, uncaptured_loss
from planner.model.options import PLAIN, ModuleOptions, lay_out
from planner.model.randomness import keep_state
from planner.model.spec import LossFunction, TrainingSpec
from planner.runtime import runtime_of


def capture_file(
    spec: TrainingSpec,
    batch: Batch,
    model: nn.Module | None = None,
    *,
    training: bool = True,
    options: ModuleOptions = PLAIN,
) -> LayerGraph:
    """Return the graph of a model with its loss.

    Args:
        spec: with the loss, and the blocks if the user names them.
        batch: example.
        model: built from `spec`, its weights perhaps without memory; None builds a new one.
        training: whether the model is captured in training mode or in evaluation mode; it is left in that mode.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
    """
    model = (spec.build_model() if model is None else model).train(training)
    deferred = is_deferred(model)
    if deferred:
        allocate_buffers(model)
    if spec.defines("blocks"):
        return capture_blocks(model, spec.blocks(model), batch, spec.loss, options=options, values=not deferred)
    if not deferred:
        try:
            return capture(model, batch, spec.loss, options=options)
        except CaptureError as failure:
            if not is_of_tracer(failure) or not _has_values(model):
                raise
            raise _with_blocks(failure, model, batch, spec.loss) from failure
    if options.channels_last:
        lay_out(model)  # now, because without storage nothing can be copied
    with without_storage(model):
        return capture(model, batch, spec.loss, options=options)


def capture(model: nn.Module, batch: Batch, loss: LossFunction | None, *, options: ModuleOptions = PLAIN) -> LayerGraph:
    """Return the graph of `model` on batches like `batch`, up to the loss.

    Args:
        model: in training or evaluation mode, which is fixed in the graph. Its parameters become the stages' own, they
            are not copied: the training and the evaluation graph of one model share them.
        batch: example; the graph is valid for other numbers of samples too, unless the model pins it.
        loss: (output, target) -> 0-dimensional loss; None where the model's output has a `.loss` or ["loss"].
        options: of the stages. Under autocast, values between layers have the dtypes that they will have on its kind of
            device; for channels-last, the model's weights are laid out so, in place.

    Raises:
        CaptureError: when the model depends on values of tensors, changes its weights in forward, or makes no loss.
    """
    return observed(traced(model, batch, loss, channels_last=options.channels_last), options)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What the tracer made of a model and its loss, before anything is known of the device that will train."""

    model: nn.Module  # the user's
    module: fx.GraphModule  # the flat graph
    example: Batch  # the batch that it was traced with
    output: _Output  # the model's


def traced(model: nn.Module, batch: Batch, loss: LossFunction | None, *, channels_last: bool = False) -> Trace:
    """Trace a model, for `observed`; arguments and errors are those of `capture`."""
    refuse_untrainable(model)
    # The tracer takes a size of one for a constant, and a tensor that occurs twice for one input.
    example = (batch.doubled() if batch.size == 1 else batch).distinct()
    if channels_last:
        lay_out(model)
        example = example.channels_last()
    forward = _ForwardToLoss(model, lambda output, target: loss_of(output, target, loss))
    try:
        module = _export(forward, example)
    except CaptureError as failure:
        if loss is None or not is_of_tracer(failure):
            raise
        forward, module = _export_without_loss(model, example, loss, failure)
    _clean(module)
    return Trace(model, module, example, forward.output)


def _export_without_loss(
    model: nn.Module, example: Batch, loss: LossFunction, failure: CaptureError
) -> tuple[_ForwardToLoss, fx.GraphModule]:
    """Trace the model alone, and let its graph call the loss as it is; raise `failure` where the loss is not at fault.

    CTC losses look at lengths, for instance. The call is one operation, which the last stage runs.
    """
    forward = _ForwardToLoss(model, None)
    try:
        module = _export(forward, example)
        if _has_values(model):
            with keep_state(model):
                found = loss_of(model(*example.args, **example.kwargs), example.target, loss)
            if found.dim() or not found.requires_grad:
                raise failure
    except Exception as cause:  # whatever the tracer, or the user's loss, raises
        raise failure from cause
    graph, spec = module.graph, example.flatten()[1].children()[-1]
    returned = graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    rest = iter(returned)
    leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in forward.output.leaves]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    targets = placeholders[len(placeholders) - spec.num_leaves :]
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(uncaptured_loss(loss, forward.output.spec, spec), (*leaves, *targets))
    node.meta["val"] = torch.empty((), device="meta")
    graph.output_node().args = ((node, *returned),)
    return forward, module


def _has_values(model: nn.Module) -> bool:
    """Return whether the weights are in memory: those of deferred and of estimated models are not."""
    return not any(
        isinstance(p, FakeTensor) or p.is_meta or p.untyped_storage().nbytes() < p.nbytes for p in model.parameters()
    )


def _with_blocks(failure: CaptureError, model: nn.Module, batch: Batch, loss: LossFunction | None) -> CaptureError:
    """Return the failure with a hint that names blocks as which the model can be captured; itself if there are none."""
    for modules, names in ((_called(model, batch)), ([model], "model")):
        try:
            capture_blocks(model, modules, batch, loss)
        except Exception:  # whatever the user's forward raises on what it is not made for
            continue
        whole = " (all of it in one stage; write modules for its parts to have several)" if names == "model" else ""
        way = f"or let the model file name parts that run as they are{whole}: def blocks(model): return [{names}]"
        return CaptureError(failure.message, hint=f"{failure.hint}; {way}")
    return failure


def _called(model: nn.Module, batch: Batch) -> tuple[list[nn.Module], str]:
    """Return the model's children, those of lists in place of these, in the order of their calls; and Python for it."""
    expressions: dict[nn.Module, str] = {}
    lists: dict[str, str] = {}
    for name, child in model.named_children():
        expression = f"model.{name}" if name.isidentifier() else f"model[{name}]"  # numbers name a sequence's parts
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            expressions |= {part: f"{expression}[{index}]" for index, part in enumerate(child)}
            lists[", ".join(f"{expression}[{index}]" for index in range(len(child)))] = f"*{expression}"
        else:
            expressions[child] = expression
    order: dict[nn.Module, None] = {}
    hooks = [part.register_forward_hook(lambda part, *_: order.setdefault(part)) for part in expressions]
    try:
        with keep_state(model), contextlib.suppress(Exception):
            model(*batch.args, **batch.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    names = ", ".join(expressions[part] for part in order)
    for parts, short in lists.items():
        names = names.replace(parts, short) if parts else names
    return list(order), names


def observed(trace: Trace, options: ModuleOptions) -> LayerGraph:
    """Return the graph of a traced model for stages that run with `options`; errors are those of `capture`."""
    model, module = trace.model, trace.module
    facts, on_cpu = _facts(trace, options)
    names = Names(model, module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    reader = SizeReader(placeholders)
    operations = [node for node in module.graph.nodes if node.op == "call_function" and not _is_number(node, reader)]
    values = [*placeholders, *operations]
    specs = _specs(values, reader, facts)
    loss, outputs = _outputs(trace, specs)
    graph = LayerGraph(
        model=model,
        module=module,
        names=names,
        reader=reader,
        layers=group_layers(model, module, names, facts, operations, specs, loss),
        specs=specs,
        inputs=tuple(Input(node, specs.get(node)) for node in placeholders),
        batch_spec=trace.example.flatten()[1],
        outputs=tuple(outputs),
        output_spec=trace.output.spec,
        loss=loss,
        tied_parameters=names.tied,
        batch_size=None if reader.dynamic else trace.example.size,
        options=options,
        written=_written(module, names, facts),
    )
    # The hash is the same for each device that the model may train on, whose values differ under autocast.
    return dataclasses.replace(graph, hash=graph_digest(graph, _specs(values, reader, on_cpu)))


class _ForwardToLoss(nn.Module):
    """The model followed by the loss, so that both are captured together."""

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        """Take a loss of output and target; with None, the output alone is returned."""
        super().__init__()
        self.add_module(MODEL, model)
        self._loss = loss
        self.output = _Output()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> tuple[Any, ...]:
        model = self.get_submodule(MODEL)
        with refuse_assignments(model):
            output = model(*args, **kwargs)
        losses = [] if self._loss is None else [self._loss(output, target)]
        self.output.leaves, self.output.spec = tree_flatten(as_tree(output))
        return (*losses, *(leaf for leaf in self.output.leaves if isinstance(leaf, Tensor)))


class _Output:
    """The model's output while it was traced: outside the module, whose attributes the tracer restores."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.spec: TreeSpec = tree_flatten(None)[1]


def as_tree(output: Any) -> Any:
    """Return `output` with dataclasses as dicts by field, because PyTorch's trees know registered ones only."""
    leaves, _ = tree_flatten(output)
    if len(leaves) != 1 or leaves[0] is not output:  # it is a tree, not a leaf
        return tree_map(as_tree, output, is_leaf=lambda part: part is not output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: as_tree(getattr(output, field.name)) for field in dataclasses.fields(output)}
    return output


def _export(forward: _ForwardToLoss, batch: Batch) -> fx.GraphModule:
    leaves, spec = batch.flatten()
    tree = spec.unflatten(leaves)
    # AUTO, because a model may pin its batch size, which a dimension declared dynamic would refuse.
    dynamic = tree_map(lambda leaf: {0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None, tree)
    with silent_tracer(), refuse_custom_autograd():
        try:
            with refuse_kept_tensors():
                # Not strict: the user's Python runs as it is. The contexts around find what this silently loses.
                program = export(forward, tree, dynamic_shapes=dynamic, strict=False)
            module = program.module()
        except Exception as cause:  # whatever the user's forward or the tracer raises
            raise capture_failure(cause, forward.get_submodule(MODEL)) from cause
    assert isinstance(module, fx.GraphModule)
    return module


def _facts(trace: Trace, options: ModuleOptions) -> tuple[TensorFacts, TensorFacts]:
    """Return the facts on the device that trains, and those on a CPU."""
    run = partial(fake_run, trace.module, trace.example.flatten()[0])
    try:
        # Without autocast nothing depends on the device but the layout that its kernels choose, if it is there to ask.
        if options.device == "cpu" or (options.autocast is None and not runtime_of(options.device).available()):
            facts = run("cpu", options.autocast)
            return facts, facts
        facts = run(options.device, options.autocast)
        try:
            on_cpu = run("cpu", options.autocast)
        except RuntimeError:
            # Some operations refuse the mixed dtypes that autocast leaves on a CPU, and take those that CUDA's leaves.
            on_cpu = run("cpu", None)
    except PlannerError:
        raise
    except Exception as cause:  # whatever the tracer's operations raise on tensors without data
        raise capture_failure(cause, trace.model) from cause
    return facts.sharing_as(on_cpu), on_cpu


def _clean(module: fx.GraphModule) -> None:
    """Remove the tracer's checks and unused attributes, and keep the name "loss" for the stage's result."""
    graph = module.graph
    # Backwards, so that the arguments of a removed check have no users when it is their turn.
    for node in reversed(list(graph.nodes)):
        if is_check(node) or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)
    for node in graph.nodes:
        if node.name == LOSS:
            node._rename("loss_value")


def _is_number(node: fx.Node, reader: SizeReader) -> bool:
    """Return whether `node` computes a number from the batch size alone, which every stage can do itself."""
    value = node.meta.get("val")
    return is_symbolic(value) and reader.expression(value) is not None


def _specs(nodes: Sequence[fx.Node], reader: SizeReader, facts: TensorFacts) -> dict[fx.Node, ValueSpec]:
    specs = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout == torch.strided and node in facts.orders:
            sizes = reader.sizes(value)
            if sizes is not None:
                dtype, requires_grad = facts.dtypes[node], facts.requires_grad[node]
                order, expanded = facts.orders[node], facts.expanded[node]
                specs[node] = ValueSpec(node.name, dtype, requires_grad, sizes, order, expanded)
    return specs


def _outputs(trace: Trace, specs: dict[fx.Node, ValueSpec]) -> tuple[fx.Node, list[Any]]:
    """Return the loss, and the leaves of the model's output with nodes in place of tensors."""
    returned = trace.module.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    loss, *tensors = returned
    spec = specs.get(loss) if isinstance(loss, fx.Node) else None
    if not isinstance(loss, fx.Node) or spec is None or spec.sizes or not spec.requires_grad:
        found = "does not depend on the model's parameters" if spec and not spec.sizes else "is not a single number"
        raise CaptureError(
            f"the loss {found}", hint="loss(output, target) must return a 0-dimensional tensor made from the output"
        )
    rest = iter(tensors)
    return loss, [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in trace.output.leaves]


def _written(module: fx.GraphModule, names: Names, facts: TensorFacts) -> frozenset[fx.Node]:
    """Return the nodes that read buffers and constants which the forward writes.

    Raises:
        CaptureError: when it writes a parameter.
    """
    # By storage, because an operation may write a tensor through a view of it.
    writers = {storage: node for node in module.graph.nodes for storage in facts.writes[node]}
    found: set[fx.Node] = set()
    for node in module.graph.find_nodes(op="get_attr"):
        for storage in facts.storages[node] & writers.keys():
            if (parameter := names.parameter(node)) is not None:
                raise CaptureError(
                    f"parameter '{parameter}' is changed in forward, by {writers[storage].target}",
                    hint="minibatches in flight need the weights they started with; without Embedding(max_norm=...) "
                    "or in-place changes of weights the model can be trained in a pipeline",
                )
            found.add(node)
    return frozenset(found)
