"""Capture a model and its loss as a LayerGraph: through torch.export with dynamic sizes of the
batch, or as blocks.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.export import Dim, export

from planner.errors import CaptureError, PlannerError
from planner.formats.files import replace
from planner.model.batch import Batch
from planner.model.capture.assignments import (
    Assignment,
    attributes_kept,
    noting_assignments,
    trace_scratch,
)
from planner.model.capture.blocks import capture_blocks
from planner.model.capture.constants import KnownConstants
from planner.model.capture.failure import (
    capture_failure,
    noting_places,
    refuse_custom_autograd,
    refuse_loss,
    refuse_pinned,
    refuse_untrainable,
    silent_tracer,
)
from planner.model.capture.fake import TensorFacts, fake_run
from planner.model.capture.fixed import fixed_operations
from planner.model.capture.foreign import RefuseForeignWeights
from planner.model.capture.graph import LOSS, LayerGraph, ValueSpec, graph_digest
from planner.model.capture.hooks import refuse_hooks, refuse_new_hooks
from planner.model.capture.layers import group_layers
from planner.model.capture.operations import MODEL, Names, is_check, name_slices
from planner.model.capture.parameters import refuse_changed_parameters
from planner.model.capture.pins import noting_pins
from planner.model.capture.recurrent import recurrence_untraced
from planner.model.capture.regions import regions_noted
from planner.model.capture.size import SizeReader, is_symbolic
from planner.model.capture.untraced_calls import (
    RefuseGenerators,
    noting_gradients,
    refuse_gradients,
)
from planner.model.deferred_weights import allocate_buffers, is_deferred, without_storage
from planner.model.lengths import Varying, varying
from planner.model.loss import loss_of
from planner.model.modes import evaluating, put_in_training
from planner.model.options import PLAIN, LossFunction, ModuleOptions
from planner.model.samples import check_samples
from planner.model.spec import TrainingSpec
from planner.model.torch_private import TreeSpec, tree_flatten, tree_map
from planner.runtime import runtime_of


def capture_file(
    spec: TrainingSpec,
    batch: Batch,
    model: nn.Module | None = None,
    *,
    training: bool = True,
    options: ModuleOptions = PLAIN,
) -> LayerGraph:
    """Return the graph of a model with its loss, as `capture` or, where the user names blocks,
    `capture_blocks` does.

    The model was built from `spec`, its weights perhaps without memory. For training, modules that
    it has in evaluation mode stay so, unless all are; for evaluation, all are in evaluation mode
    while it is captured.

    Raises:
        CaptureError: as `capture` does, or when forward changes which parameters there are, or are
            trained.
    """
    model = spec.build_model() if model is None else model
    check_samples(batch, partial(spec.example_batch, checked=False), spec.place("example_batch"))
    if training:
        put_in_training(model)
        with refuse_changed_parameters(model):
            return _capture_as_it_is(spec, batch, model, options)
    with evaluating(model), refuse_changed_parameters(model):
        return _capture_as_it_is(spec, batch, model, options)


def _capture_as_it_is(
    spec: TrainingSpec, batch: Batch, model: nn.Module, options: ModuleOptions
) -> LayerGraph:
    lengths = varying(spec, max(2, batch.size))
    deferred = is_deferred(model)
    if deferred:
        allocate_buffers(model)
    if spec.defines("blocks"):
        if lengths is not None:
            raise CaptureError(
                f"'{spec.origin}' has lengths() and blocks(), and blocks are captured for one "
                f"length only",
                hint="leave one of them out",
            )
        return capture_blocks(
            model,
            spec.blocks(model),
            batch,
            options.loss(spec.loss),
            options=options,
            values=not deferred,
        )

    options.prepare(model)  # now, because without storage nothing can be copied
    with without_storage(model):
        return capture(model, batch, options.loss(spec.loss), options=options, lengths=lengths)


def capture(
    model: nn.Module,
    batch: Batch,
    loss: LossFunction | None,
    *,
    options: ModuleOptions = PLAIN,
    lengths: Varying | None = None,
) -> LayerGraph:
    """Return the graph of `model` on batches like `batch`, up to the loss.

    The modes of modules are fixed in the graph; the model's parameters become the stages' own.
    Values between layers have the dtypes that they will have under autocast on the device of
    `options`. Channels-last weights are laid out in place.

    Raises:
        CaptureError: when the model depends on values of tensors, changes its weights in forward,
            makes no loss, or takes not all of the `lengths`.
    """
    return observed(traced(model, batch, loss, options, lengths), options)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What the tracer made of a model and its loss, before anything is known of the device that
    will train.
    """

    model: nn.Module
    module: fx.GraphModule  # the flat graph
    example: Batch
    output: "_Output"
    lengths: Varying | None = None
    pinned_at: str | None = None  # the user's line that fixes the number of samples, if one does


def traced(
    model: nn.Module,
    batch: Batch,
    loss: LossFunction | None,
    options: ModuleOptions = PLAIN,
    lengths: Varying | None = None,
) -> Trace:
    """Trace a model, for `observed`; arguments and errors are those of `capture`."""
    refuse_untrainable(model)
    refuse_hooks(model)
    # The tracer takes a size of one for a constant, and a tensor that occurs twice for one input.
    options.prepare(model)
    example = (batch.doubled() if batch.size == 1 else batch).distinct().prepared(options)
    leaves, spec = example.flatten()
    tree = spec.unflatten(leaves)
    # AUTO, because a model may pin its batch size, which a dimension declared dynamic would refuse.
    # What it pins of lengths is found afterwards, with the place.
    places = () if lengths is None else lengths.places
    dynamic = spec.unflatten(
        [
            {0: Dim.AUTO} | {place: Dim.AUTO for number, place in places if number == leaf}
            if isinstance(value, Tensor) and value.dim()
            else None
            for leaf, value in enumerate(leaves)
        ]
    )
    output = _Output()

    def trace(noted: list[Assignment]) -> fx.GraphModule:
        forward = _ForwardToLoss(model, loss, output, noted)
        with attributes_kept(model):
            # Not strict: the user's Python runs as it is. The contexts around find what this
            # silently loses.
            made = export(forward, tree, dynamic_shapes=dynamic, strict=False).module()
        assert isinstance(made, fx.GraphModule)
        return made

    with ExitStack() as contexts:
        for context in (
            silent_tracer(),
            regions_noted(),
            refuse_custom_autograd(),
            refuse_new_hooks(),
        ):
            contexts.enter_context(context)
        for context in (recurrence_untraced(), noting_places()) if places else ():
            contexts.enter_context(context)
        pins = contexts.enter_context(noting_pins())
        gradients = contexts.enter_context(noting_gradients())
        try:
            assignments: list[Assignment] = []
            module = trace(assignments)
            if assignments:
                trace_scratch(model, trace, assignments, module)
        except Exception as cause:  # whatever the user's forward or the tracer raises
            if not isinstance(cause, PlannerError):
                refuse_gradients(gradients, cause)
            raise capture_failure(cause, model) from cause

    name_slices(module, model)
    if lengths is not None:
        refuse_pinned(model, module.graph.find_nodes(op="placeholder"), lengths)
    # Without the tracer's checks and unused attributes. Backwards, so that the arguments of a
    # removed check have no users when it is their turn.
    for node in reversed(list(module.graph.nodes)):
        if is_check(node) or (node.op == "get_attr" and not node.users):
            module.graph.erase_node(node)
        elif node.name == LOSS:
            node._rename("loss_value")  # "loss" is the stage's result

    return Trace(model, module, example, output, lengths, next(iter(pins), None))


def observed(trace: Trace, options: ModuleOptions) -> LayerGraph:
    """Return the graph of a traced model for stages that run with `options`; errors are those of
    `capture`.
    """
    model = trace.model
    module = trace.module
    facts, on_cpu = _facts(trace, options)
    names = Names(model, module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    reader = SizeReader(placeholders)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    symbolic = {node: value for node in calls if is_symbolic(value := node.meta.get("val"))}
    # Every stage computes itself the numbers that depend on the batch size alone.
    operations = [
        node for node in calls if node not in symbolic or reader.expression(symbolic[node]) is None
    ]
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
        inputs=tuple(placeholders),
        batch_spec=trace.example.flatten()[1],
        outputs=tuple(outputs),
        output_spec=trace.output.spec,
        loss=loss,
        tied_parameters=names.tied,
        batch_size=None if reader.dynamic and not _pinned(placeholders) else trace.example.size,
        pinned_at=trace.pinned_at,
        constants=_constants(trace.example),
        options=options,
        written=_written(module, names, facts),
        lengths=tuple(map(trace.lengths.length, reader.places))
        if trace.lengths is not None
        else (),
    )
    graph = replace(graph, fixed=fixed_operations(graph, operations, facts))
    # The hash is the same for each device that the model may train on, whose values differ under
    # autocast.
    return replace(graph, hash=graph_digest(graph, _specs(values, reader, on_cpu)))


def _pinned(placeholders: Sequence[fx.Node]) -> bool:
    """Return whether the model takes some tensor of the batch for one number of samples only."""
    values = [node.meta.get("val") for node in placeholders]
    sizes = [value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()]
    return any(isinstance(size, int) or not size.node.expr.free_symbols for size in sizes)


def _constants(example: Batch) -> dict[int, Any]:
    """Return what is no tensor in a batch, by its place among the leaves: the tracer made it part
    of the graph.
    """
    return {
        place: leaf
        for place, leaf in enumerate(example.flatten()[0])
        if not isinstance(leaf, Tensor)
    }


def layouts_kept() -> AbstractContextManager[object]:
    """Let the tracer record `contiguous()` also where it copies nothing.

    The kernels of another device may lay values out otherwise. nn.MultiheadAttention is such a
    case: on a CPU its attention leaves nothing to copy, on CUDA it does. Tensor.contiguous by
    itself asks before it calls an operation.
    """
    return mock.patch.object(
        Tensor, "contiguous", lambda self, **layout: torch.ops.aten.contiguous(self, **layout)
    )


def _causal_if_told(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Return whether a mask is known to be causal without a look at it."""
    return bool(is_causal)


def _masks_unread() -> AbstractContextManager[object]:
    """Let nn.Transformer take its masks as they are: it looks at them for kernels that need none if
    they are causal.

    Both compute the same, to rounding.
    """
    return mock.patch("torch.nn.modules.transformer._detect_is_causal_mask", _causal_if_told)


def _distributions_unchecked() -> AbstractContextManager[object]:
    """Let torch.distributions not look at arguments and samples, unless a distribution asks for it
    itself.

    Those that a distribution makes for its own use look as well, whatever it was told. They compute
    the same.
    """
    return mock.patch.object(Distribution, "_validate_args", False)


@contextmanager
def values_unread() -> Iterator[None]:
    """Let what PyTorch and the model ask of values be answered, or not be asked, where a tracer has
    none.
    """
    with (
        layouts_kept(),
        _masks_unread(),
        _distributions_unchecked(),
        KnownConstants(),
        RefuseGenerators(),
    ):
        yield


class _ForwardToLoss(nn.Module):
    """The model followed by the loss, so that both are captured together."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        output: "_Output",
        noted: list[Assignment],
    ) -> None:
        super().__init__()
        self.add_module(MODEL, model)
        self._loss = partial(loss_of, loss=loss)  # it may be a module, which is not the model's
        # In functions, because the tracer copies and restores a module's attributes.
        self._tell_output = partial(setattr, output)
        self._noting = partial(noting_assignments, noted=noted)

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Any, ...]:
        model = self.get_submodule(MODEL)
        # Here, because the tracer puts other tensors in place of the parameters, and takes them out
        # afterwards.
        with values_unread(), refuse_changed_parameters(model), RefuseForeignWeights(model):
            with self._noting(model):
                output = model(*args, **kwargs)
            loss = self._loss(output, target)

        leaves, spec = tree_flatten(as_tree(output))
        self._tell_output("leaves", leaves)
        self._tell_output("spec", spec)
        return (loss, *(leaf for leaf in leaves if isinstance(leaf, Tensor)))


class _Output:
    """The model's output while it was traced: outside the module, whose attributes the tracer
    restores.
    """

    leaves: list[Any]
    spec: TreeSpec


def as_tree(output: Any) -> Any:
    """Return `output` with dataclasses as dicts by field, because PyTorch's trees know registered
    ones only.
    """
    leaves, _ = tree_flatten(output)
    if len(leaves) != 1 or leaves[0] is not output:  # it is a tree, not a leaf
        return tree_map(as_tree, output, is_leaf=lambda part: part is not output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {
            field.name: as_tree(getattr(output, field.name)) for field in dataclasses.fields(output)
        }
    return output


def _facts(trace: Trace, options: ModuleOptions) -> tuple[TensorFacts, TensorFacts]:
    """Return the facts on the device that trains, and those on a CPU."""
    run = partial(fake_run, trace.module, trace.example.flatten()[0])
    try:
        # Without autocast nothing depends on the device but the layout that its kernels choose, if
        # it is there to ask.
        if options.device == "cpu" or (
            options.autocast is None and not runtime_of(options.device).available()
        ):
            facts = run("cpu", options.autocast)
            return facts, facts
        facts = run(options.device, options.autocast)
        try:
            on_cpu = run("cpu", options.autocast)
        except RuntimeError:
            # Some operations refuse the mixed dtypes that autocast leaves on a CPU, and take those
            # that CUDA's leaves.
            on_cpu = run("cpu", None)
    except PlannerError:
        raise
    except Exception as cause:  # whatever the tracer's operations raise on tensors without data
        raise capture_failure(cause, trace.model) from cause

    return facts.sharing_as(on_cpu), on_cpu


def _specs(
    nodes: Sequence[fx.Node], reader: SizeReader, facts: TensorFacts
) -> dict[fx.Node, ValueSpec]:
    specs = {}
    for node in nodes:
        traced_as = node.meta.get("val")
        value = facts.values.get(node)
        if (
            value is not None
            and isinstance(traced_as, Tensor)
            and traced_as.layout == torch.strided
        ):
            sizes = reader.sizes(traced_as)
            if sizes is not None:
                # An in-place operation can make a value made before it need a gradient: the value
                # knows by now.
                specs[node] = ValueSpec.of(node.name, value, sizes)

    return specs


def _outputs(trace: Trace, specs: dict[fx.Node, ValueSpec]) -> tuple[fx.Node, list[Any]]:
    """Return the loss, and the leaves of the model's output with nodes in place of tensors."""
    returned = trace.module.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    loss, *tensors = returned

    spec = None
    if isinstance(loss, fx.Node):
        spec = specs.get(loss)
    if spec is None:
        refuse_loss(1, False)
    else:
        refuse_loss(len(spec.sizes), spec.requires_grad)

    assert isinstance(loss, fx.Node)

    rest = iter(tensors)
    leaves = []
    for leaf in trace.output.leaves:
        if isinstance(leaf, Tensor):
            leaves.append(next(rest))
        else:
            leaves.append(leaf)

    return loss, leaves


def _written(module: fx.GraphModule, names: Names, facts: TensorFacts) -> frozenset[fx.Node]:
    """Return the inputs, and the nodes that read buffers and constants, which the forward writes.

    Refuse to write parameters.
    """
    # By storage, because an operation may write a tensor through a view of it.
    writers = {storage: node for node in module.graph.nodes for storage in facts.writes[node]}
    found: set[fx.Node] = set()
    for node in module.graph.find_nodes(op="get_attr"):
        for storage in facts.storages[node] & writers.keys():
            if (parameter := names.parameter(node)) is not None:
                raise CaptureError(
                    f"parameter '{parameter}' is changed in forward, by {writers[storage].target}",
                    hint="minibatches in flight need the weights they started with; without "
                    "Embedding(max_norm=...) "
                    "or in-place changes of weights the model can be trained in a pipeline",
                )
            found.add(node)

    found.update(
        node
        for node in module.graph.find_nodes(op="placeholder")
        if facts.storages[node] & writers.keys()
    )
    return frozenset(found)
