"""Model and example batch -> LayerGraph, through torch.export with a dynamic batch dimension."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_map

from planner.errors import CaptureError
from planner.model.autocast import autocasting
from planner.model.batch import Batch
from planner.model.capture.digest import graph_digest
from planner.model.capture.failure import (
    capture_failure,
    refuse_assignments,
    refuse_custom_autograd,
    refuse_kept_tensors,
    refuse_untrainable,
    silent_tracer,
)
from planner.model.capture.fake_run import Observed, observe
from planner.model.capture.graph import Input, LayerGraph, ValueSpec
from planner.model.capture.layers import group_layers
from planner.model.capture.names import MODEL, Names
from planner.model.capture.size import SizeReader, is_symbolic
from planner.model.loss import LossFunction, loss_of
from planner.model.memory_format import lay_out
from planner.model.options import PLAIN, ModuleOptions

# Checks of the tracer's assumptions, each of which pins a device or costs time. A stage checks its inputs itself.
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def capture(
    model: nn.Module,
    batch: Batch,
    loss: LossFunction | None,
    *,
    training: bool = True,
    options: ModuleOptions = PLAIN,
) -> LayerGraph:
    """The forward of `model` on batches like `batch`, up to the loss.

    Args:
        model: put into training mode, or into evaluation mode; its parameters become the stages' own, they are not
            copied. So the two graphs of one model share them.
        batch: example; the graph is good for other numbers of samples too, unless the model pins it.
        loss: (output, target) -> 0-dimensional loss; None where the model's output has a `.loss` or ["loss"].
        training: the mode; what a graph does in it cannot be changed afterwards.
        options: of the stages. Under autocast, values between layers have its type, too; for channels-last, the
            model's weights are laid out so, in place.

    Raises:
        CaptureError: when the model depends on values of tensors, changes its weights in forward, or makes no loss.
    """
    refuse_untrainable(model)
    # A size of one would be taken for a constant, and a tensor that occurs twice for one input.
    example = (batch.doubled() if batch.size == 1 else batch).distinct()
    if options.channels_last:
        lay_out(model)
        example = example.channels_last()
    forward = _ForwardToLoss(model.train(training), loss)
    module = _export(forward, example)
    _clean(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    try:
        with autocasting(example.device_type, options.autocast):
            observed = observe(module, example.flatten()[0])
    except Exception as cause:  # whatever the tracer's operations raise on tensors without data
        raise capture_failure(cause, model) from cause
    names = Names(model, module)
    _check_weights_unchanged(module, names, observed)
    reader = SizeReader(placeholders)
    operations = [node for node in module.graph.nodes if node.op == "call_function" and not _is_number(node, reader)]
    specs = {node: spec for node in (*placeholders, *operations) if (spec := _spec(node, reader, observed)) is not None}
    loss_node, outputs = _outputs(module, forward, specs)
    # In evaluation the stages have the weights that training gave them, read or not.
    grouping = partial(group_layers, adopt_unused=training)
    layers = grouping(module, model, names, observed, operations, specs.__contains__, loss_node)
    graph = LayerGraph(
        model=model,
        module=module,
        names=names,
        reader=reader,
        layers=layers,
        specs=specs,
        inputs=tuple(Input(node, specs.get(node)) for node in placeholders),
        batch_spec=example.flatten()[1],
        outputs=tuple(outputs),
        output_spec=forward.output.spec,
        loss=loss_node,
        tied_parameters=names.tied,
        batch_size=None if reader.dynamic else example.size,
        hash="",
        autocast=options.autocast,
        channels_last=options.channels_last,
    )
    return graph.with_hash(graph_digest(graph))


class _ForwardToLoss(nn.Module):
    """The model with the loss behind it, so that both are captured together."""

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        super().__init__()
        self.add_module(MODEL, model)
        self._loss = loss
        self.output = _Output()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> tuple[Any, ...]:
        model = self.get_submodule(MODEL)
        with refuse_assignments(model):
            output = model(*args, **kwargs)
        loss = loss_of(output, target, self._loss)
        self.output.leaves, self.output.spec = tree_flatten(as_tree(output))
        return (loss, *(leaf for leaf in self.output.leaves if isinstance(leaf, Tensor)))


class _Output:
    """The model's output as it was while traced. Not in the module itself, whose attributes the tracer restores."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.spec: TreeSpec = tree_flatten(None)[1]


def as_tree(output: Any) -> Any:
    """Dataclasses become dicts by field: only those registered with PyTorch's trees can be taken apart."""
    if not tree_is_leaf(output):
        return tree_map(as_tree, output, is_leaf=lambda part: part is not output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: as_tree(getattr(output, field.name)) for field in dataclasses.fields(output)}
    return output


def _export(forward: _ForwardToLoss, batch: Batch) -> fx.GraphModule:
    leaves, spec = batch.flatten()
    tree = spec.unflatten(leaves)
    dynamic = tree_map(lambda leaf: {0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() else None, tree)
    with silent_tracer(), refuse_custom_autograd():
        try:
            with refuse_kept_tensors():
                program = export(forward, tree, dynamic_shapes=dynamic, strict=False)
            module = program.module()
        except Exception as cause:  # whatever the user's forward or the tracer raises
            raise capture_failure(cause, forward.get_submodule(MODEL)) from cause
    assert isinstance(module, fx.GraphModule)
    return module


def _clean(module: fx.GraphModule) -> None:
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        check = node.op == "call_module" or (
            node.op == "call_function" and any(word in str(node.target) for word in _CHECKS)
        )
        if check or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)
    for node in graph.nodes:
        if node.name == "loss":  # the key under which a stage returns the loss
            node._rename("loss_value")


def _is_number(node: fx.Node, reader: SizeReader) -> bool:
    """Whether `node` computes a number from the batch size alone, which every stage can do itself."""
    value = node.meta.get("val")
    return is_symbolic(value) and reader.expression(value) is not None


def _spec(node: fx.Node, reader: SizeReader, observed: Observed) -> ValueSpec | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided or node not in observed.orders:
        return None
    sizes = reader.sizes(value)
    if sizes is None:
        return None
    requires_grad, order = observed.requires_grad[node], observed.orders[node]
    return ValueSpec(node.name, observed.dtypes[node], requires_grad, sizes, order, observed.expanded[node])


def _outputs(
    module: fx.GraphModule, forward: _ForwardToLoss, specs: dict[fx.Node, ValueSpec]
) -> tuple[fx.Node, list[Any]]:
    """The loss, and the leaves of the model's output with nodes in place of tensors."""
    returned = module.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    loss, *tensors = returned
    spec = specs.get(loss) if isinstance(loss, fx.Node) else None
    if not isinstance(loss, fx.Node) or spec is None or spec.sizes or not spec.requires_grad:
        found = "does not depend on the model's parameters" if spec and not spec.sizes else "is not a single number"
        raise CaptureError(
            f"the loss {found}", hint="loss(output, target) must return a 0-dimensional tensor made from the output"
        )
    rest = iter(tensors)
    return loss, [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in forward.output.leaves]


def _check_weights_unchanged(module: fx.GraphModule, names: Names, observed: Observed) -> None:
    parameters = {
        storage: name
        for node in module.graph.nodes
        if (name := names.parameter(node)) is not None
        for storage in observed.storages[node]
    }
    for node in module.graph.nodes:
        for storage in observed.writes[node]:
            if storage in parameters:
                raise CaptureError(
                    f"parameter '{parameters[storage]}' is changed in forward, by {node.target}",
                    hint="minibatches in flight need the weights they started with; without Embedding(max_norm=...) "
                    "or in-place changes of weights the model can be trained in a pipeline",
                )
