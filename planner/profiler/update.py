"""What the user's optimizer costs, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from planner.model.file import ModelFile
from planner.profiler.clock import Clock, MarkT

_REPEATS = 3


@dataclass(frozen=True)
class LayerUpdate:
    """The optimizer's step on one layer's parameters alone."""

    seconds: float
    state_bytes: int


def still(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with a learning rate of zero: the same work, and the weights stay what they are."""
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    return optimizer


def layer_updates(
    model_file: ModelFile, layers: Sequence[Mapping[str, nn.Parameter]], clock: Clock[MarkT]
) -> list[LayerUpdate]:
    """Time a step on the parameters of each layer, whose gradients must be there.

    Args:
        model_file: makes the optimizers.
        layers: parameters to train by name, per layer.
        clock: of the parameters' device.
    """
    return [_layer_update(model_file, parameters, clock) for parameters in layers]


def _layer_update(model_file: ModelFile, parameters: Mapping[str, nn.Parameter], clock: Clock[MarkT]) -> LayerUpdate:
    if not parameters:
        return LayerUpdate(0.0, 0)
    optimizer = still(model_file.optimizer(parameters))
    optimizer.step()  # makes the state
    times = []
    for _ in range(_REPEATS):
        clock.wait()
        start = clock.mark()
        optimizer.step()
        end = clock.mark()
        clock.wait()
        times.append(clock.seconds(start, end))
    return LayerUpdate(sorted(times)[_REPEATS // 2], state_bytes_of(optimizer))


def state_bytes_of(optimizer: Optimizer) -> int:
    """Bytes of the tensors that the optimizer keeps between steps."""
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in state)
