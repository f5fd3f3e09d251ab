"""Measure what a step of the user's optimizer costs, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from planner.model.spec import TrainingSpec
from planner.profiler.measured.clock import Clock, MarkT
from planner.profiler.measured.workspace import meter_for

_REPEATS = 3
_LEAST_METERED_BYTES = 10**6


@dataclass(frozen=True)
class LayerUpdate:
    """Cost of the optimizer's step on one layer's parameters alone.

    `workspace_bytes`: the most that it allocates beyond its state.
    """

    seconds: float
    state_bytes: int
    workspace_bytes: int = 0


def still(optimizer: Optimizer) -> Optimizer:
    """Set the learning rate to zero: steps do the same work, and the weights stay what they are."""
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    return optimizer


def layer_updates(
    spec: TrainingSpec, layers: Sequence[Mapping[str, nn.Parameter]], clock: Clock[MarkT], device: torch.device
) -> list[LayerUpdate]:
    """Measure a step on the parameters of each layer, which must have gradients.

    Args:
        layers: parameters to train by name, per layer.
    """
    updates = [_layer_update(spec, parameters, clock) for parameters in layers]
    # Metered after all are timed, because metering slows steps down.
    sizes = update_workspaces(spec, layers, device)
    return [replace(update, workspace_bytes=size) for update, size in zip(updates, sizes, strict=True)]


def _layer_update(spec: TrainingSpec, parameters: Mapping[str, nn.Parameter], clock: Clock[MarkT]) -> LayerUpdate:
    if not parameters:
        return LayerUpdate(0.0, 0)
    optimizer = still(spec.optimizer(parameters))
    optimizer.step()  # creates the state
    times = []
    for _ in range(_REPEATS):
        clock.wait()
        start = clock.mark()
        optimizer.step()
        end = clock.mark()
        clock.wait()
        times.append(clock.seconds(start, end))
    return LayerUpdate(median(times), state_bytes_of(optimizer))


def update_workspaces(
    spec: TrainingSpec, layers: Sequence[Mapping[str, nn.Parameter]], device: torch.device
) -> list[int]:
    """Return the most that a step on each layer's parameters, which must have gradients, allocates beyond its state."""
    # Metering takes longer than a small step itself, whose workspace is of a parameter's size and thus negligible.
    large = [sum(p.nbytes for p in parameters.values()) >= _LEAST_METERED_BYTES for parameters in layers]
    return [
        _update_workspace(spec, parameters, device) if metered else 0
        for parameters, metered in zip(layers, large, strict=True)
    ]


def _update_workspace(spec: TrainingSpec, parameters: Mapping[str, nn.Parameter], device: torch.device) -> int:
    optimizer = still(spec.optimizer(parameters))
    optimizer.step()  # creates the state
    meter = meter_for(device)
    with meter:
        meter.mark()
        optimizer.step()
        meter.mark()
    return meter.peaks()[1]


def state_bytes_of(optimizer: Optimizer) -> int:
    """Return the bytes of the tensors that the optimizer keeps between steps."""
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in state)
