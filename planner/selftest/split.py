"""One training step in this process: of the user's own module, and of its layers as stages that exchange messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph, ValueSpec
from planner.model.loss import loss_of
from planner.model.options import ModuleOptions, autocasting
from planner.model.spec import LossFunction
from planner.model.stage.stage import StageModule, build_stage


class CutError(Exception):
    """A value at a cut is not what the captured graph says; its text names the value and both."""


@dataclass(frozen=True)
class Step:
    """The loss and the gradients of one step, by the parameters' names."""

    loss: Tensor
    gradients: dict[str, Tensor | None]

    def difference(self, other: Step) -> tuple[float, str]:
        """Return the largest difference from another step, relative to its tensor's largest entry, and where it is."""
        worst = _relative(self.loss, other.loss), "the loss"
        for name, gradient in self.gradients.items():
            wanted = other.gradients[name]
            if gradient is None or wanted is None:
                if gradient is not wanted:
                    return float("inf"), f"the gradient of '{name}', which one of the two has not"
                continue
            worst = max(worst, (_relative(gradient, wanted), f"the gradient of '{name}'"))
        return worst


def _relative(one: Tensor, other: Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    largest = float(other.abs().max()) or 1.0
    difference = float((one - other).abs().max()) / largest
    return difference if difference == difference else float("inf")  # NaN


def eager_step(
    model: nn.Module, batch: Batch, loss: LossFunction | None, device: torch.device, options: ModuleOptions
) -> Step:
    """Run a step of the user's own module; its buffers stay as they were."""
    with _fresh(model):
        with autocasting(device.type, options.autocast):
            value = loss_of(model(*batch.args, **batch.kwargs), batch.target, loss)
        torch.autograd.backward(value)
        return _step(value, model)


def split_step(graph: LayerGraph, batch: Batch, cut: Sequence[Sequence[str]]) -> Step:
    """Run the same step through the stages of `cut`, forward and then backward in reverse, as workers would.

    Values cross as copies without history, gradients return by hand. The stages share the module's weights.

    Raises:
        CutError: when a value that crosses has another type, shape or need of a gradient than the graph says.
    """
    with _fresh(graph.model):
        # The weights are there already; a stage's constants are its own.
        device = next(graph.model.parameters()).device
        stages = [build_stage(graph, names).to(device) for names in cut]
        known: dict[str, Tensor] = {}
        runs = []
        for stage in stages:
            received = {
                spec.name: through_a_message(spec, known[spec.name], batch.size).requires_grad_(spec.requires_grad)
                for spec in stage.received
            }
            results = stage(batch if stage.needs_batch else None, received)
            for spec in stage.sent:
                _check(spec, results[spec.name], batch.size)
            known.update(results)
            runs.append((stage, received, results))
        gradients: dict[str, Tensor] = {}
        for run in reversed(runs):
            stage_backward(run, gradients, batch.size)
        return _step(known["loss"], graph.model)


def stage_backward(
    run: tuple[StageModule, dict[str, Tensor], dict[str, Tensor]], gradients: dict[str, Tensor], batch_size: int
) -> None:
    """Run the backward of a stage that has run, from and into `gradients` of the values that cross."""
    stage, received, results = run
    roots: list[Tensor] = [results["loss"]] if stage.has_loss else []
    seeds: list[Tensor | None] = [None] if stage.has_loss else []
    for spec in stage.sent:
        if spec.requires_grad and spec.name in gradients:
            roots.append(results[spec.name])
            seeds.append(gradients.pop(spec.name))
    if roots:
        torch.autograd.backward(roots, seeds)
    for spec in stage.received:
        gradient = received[spec.name].grad
        if gradient is not None:
            gradients[spec.name] = through_a_message(spec.of_gradient, gradient, batch_size)


def through_a_message(spec: ValueSpec, value: Tensor, batch_size: int) -> Tensor:
    """Return what a message makes of a value: memory of its own, without gaps and without history."""
    copy = spec.to_wire(value.detach()).clone(memory_format=torch.contiguous_format)
    return spec.from_wire(copy, batch_size)


def _check(spec: ValueSpec, value: Tensor, batch_size: int) -> None:
    wanted = (tuple(spec.shape(batch_size)), spec.dtype, spec.requires_grad)
    found = (tuple(value.shape), value.dtype, value.requires_grad)
    if found != wanted:
        raise CutError(f"the value '{spec.name}' has shape, type and need of a gradient {found}, captured {wanted}")


def _step(loss: Tensor, model: nn.Module) -> Step:
    gradients = {
        name: None if parameter.grad is None else parameter.grad.detach()
        for name, parameter in model.named_parameters()
    }
    return Step(loss.detach(), gradients)


@contextmanager
def _fresh(model: nn.Module) -> Iterator[None]:
    """Begin without gradients, and put the buffers back at the end."""
    for parameter in model.parameters():
        parameter.grad = None
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(before[name])
