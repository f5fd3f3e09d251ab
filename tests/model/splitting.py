"""Running a model in stages as workers would: values cross as copies, gradients return by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from planner.model.batch import Batch
from planner.model.capture.capture import as_tree
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.loss import loss_of
from planner.model.options import LossFunction, autocasting
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage


@dataclass(frozen=True)
class Step:
    """What one forward and backward leaves behind."""

    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def cut_evenly(graph: LayerGraph, stages: int) -> list[list[str]]:
    """Names of the layers of each of `stages` stages; as many as there are layers at most."""
    names = [layer.name for layer in graph.layers]
    bounds = [round(k * len(names) / stages) for k in range(stages + 1)]
    return [names[a:b] for a, b in pairwise(bounds) if b > a]


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    return [
        (owner, name, buffer, buffer.clone())
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]


def _put_back(before: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for owner, name, buffer, values in before:
        # a forward may have put another tensor in its place, of another shape
        setattr(owner, name, buffer)
        buffer.data.copy_(values)


def run_split(
    graph: LayerGraph,
    batch: Batch,
    cut: Sequence[Sequence[str]],
    key: tuple[int, int, int] | None,
    *,
    compile_: bool = False,
) -> Step:
    """Forward through the stages of `cut`, backward through them in reverse; the model's buffers
    are put back.
    """
    model = graph.model
    for parameter in model.parameters():
        parameter.grad = None
    before = _buffers(model)
    keep = [leaf.name for leaf in graph.outputs if isinstance(leaf, fx.Node)]
    stages = [
        build_stage(graph, names, keep=keep, variant=Variant(compiled=compile_)) for names in cut
    ]
    received, results = _forward(stages, batch, key)
    _backward(stages, received, results, batch.size)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _put_back(before)
    values = {name: value for result in results for name, value in result.items()}
    return Step(
        loss=values["loss"].detach(),
        outputs={name: values[name].detach() for name in keep},
        gradients={name: parameter.grad for name, parameter in model.named_parameters()},
        buffers=after,
    )


def run_model(graph: LayerGraph, batch: Batch, loss: LossFunction | None) -> Step:
    """The same step of the user's own model, in the mode that it is in."""
    model = graph.model
    for parameter in model.parameters():
        parameter.grad = None
    before = _buffers(model)
    batch = batch.prepared(graph.options)
    with autocasting("cpu", graph.options.autocast):
        output = model(*batch.args, **batch.kwargs)
        value = loss_of(output, batch.target, loss)
    value.backward()  # type: ignore[no-untyped-call]
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _put_back(before)
    names = [leaf.name for leaf in graph.outputs if isinstance(leaf, fx.Node)]
    leaves = (
        [leaf for leaf in tree_leaves(as_tree(output)) if isinstance(leaf, Tensor)] if names else []
    )
    return Step(
        loss=value.detach(),
        outputs={name: leaf.detach() for name, leaf in zip(names, leaves, strict=True)},
        gradients={name: parameter.grad for name, parameter in model.named_parameters()},
        buffers=after,
    )


def _forward(
    stages: Sequence[StageModule], batch: Batch, key: tuple[int, int, int] | None
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    wire: dict[str, Tensor] = {}
    all_received, results = [], []
    for stage in stages:
        received = {}
        for spec in stage.received:
            value = through_a_message(spec, wire[spec.name], batch.size)
            received[spec.name] = value.requires_grad_(spec.requires_grad)
        if key is not None:
            stage.set_random_key(*key)
        result = stage(batch if stage.needs_batch else None, received)
        for spec in stage.sent:
            value = result[spec.name]
            assert value.requires_grad == spec.requires_grad, spec
            assert tuple(value.shape) == spec.shape(batch.size), spec
            assert value.dtype == spec.dtype, spec
        wire.update(result)
        all_received.append(received)
        results.append(result)
    return all_received, results


def _backward(
    stages: Sequence[StageModule],
    received: list[dict[str, Tensor]],
    results: list[dict[str, Tensor]],
    batch_size: int,
) -> None:
    gradients: dict[str, Tensor] = {}
    for run in reversed(list(zip(stages, received, results, strict=True))):
        stage_backward(run, gradients, batch_size)


def assert_same(one: Step, other: Step) -> None:
    """Equal to the bit, in everything."""
    assert torch.equal(one.loss, other.loss)
    for mine, theirs in ((one.outputs, other.outputs), (one.buffers, other.buffers)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        theirs_gradient = other.gradients[name]
        if gradient is None or theirs_gradient is None:
            assert gradient is theirs_gradient, name
        else:
            assert torch.equal(gradient, theirs_gradient), name


def stage_backward(
    run: tuple[StageModule, dict[str, Tensor], dict[str, Tensor]],
    gradients: dict[str, Tensor],
    batch_size: int,
) -> None:
    """Run the backward of a stage that has run, from and into `gradients` of the values
    that cross.
    """
    stage, received, results = run
    seeds: list[tuple[Tensor, Tensor | None]] = [(results["loss"], None)] if stage.has_loss else []
    crossing = [spec.name for spec in stage.sent if spec.requires_grad and spec.name in gradients]
    seeds += [(results[name], gradients.pop(name)) for name in crossing]
    if seeds:
        torch.autograd.backward([root for root, _ in seeds], [seed for _, seed in seeds])
    for spec in stage.received:
        if (gradient := received[spec.name].grad) is not None:
            gradients[spec.name] = through_a_message(spec.of_gradient, gradient, batch_size)


def through_a_message(spec: ValueSpec, value: Tensor, batch_size: int) -> Tensor:
    """Return what a message makes of a value: memory of its own, without gaps and without
    history.
    """
    copy = spec.to_wire(value.detach()).clone(memory_format=torch.contiguous_format)
    return spec.from_wire(copy, batch_size)
