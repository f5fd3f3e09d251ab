"""Measure the optimizer's step and gradient accumulation, layer by layer.

The first backward after an update sets the gradients. Each further one before the next update adds to them: it reads
both and writes the sum. Autograd does so for a weight as soon as its gradient is complete. Hooks right before and right
after therefore time it alone, within a training step, with the caches as they are then. The difference between two
whole backwards would drown in noise: it is 8 ms of 90 on VGG-16, of which the hooks see 90%.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from planner.model.spec import TrainingSpec
from planner.profiler.step.allocation import meter_for
from planner.profiler.step.timing import Clock, CpuClock, MarkT

Layers = Sequence[Mapping[str, nn.Parameter]]  # trained parameters by name, per layer
_GENEROUS = 2.0  # times what a large tensor needs per byte: the gradients lie in several places
_CALL_S = 50e-6  # for each weight, whose addition is a call of its own
_ADDED_BYTES = 32 * 2**20  # more than the caches hold
_Spans = list[tuple[int, Any, Any]]  # of one backward: layer, and marks before and after each of its weights


@dataclass(frozen=True)
class AccumulationTime:
    """Seconds by which adding to a layer's gradients takes longer than setting them.

    `thread_seconds`: processor time of the thread, on a CPU.
    """

    seconds: float = 0.0
    thread_seconds: float | None = None


def bounded(times: Sequence[AccumulationTime], layers: Layers, clock: Clock[Any]) -> list[AccumulationTime]:
    """Return the times, each at most what the memory needs to read both gradients and to write their sum.

    On a busy machine the difference of two medians is noise where a layer's gradients are small.
    """
    devices = [parameter.device for layer in layers for parameter in layer.values()]
    if not devices or not any(each.seconds for each in times):
        return list(times)
    per_byte_s = _adding_s_per_byte(clock, devices[0])
    most = [
        _GENEROUS * per_byte_s * sum(parameter.nbytes for parameter in layer.values()) + _CALL_S * len(layer)
        for layer in layers
    ]
    return [
        AccumulationTime(
            min(each.seconds, limit_s),
            None if each.thread_seconds is None else min(each.thread_seconds, limit_s),
        )
        for each, limit_s in zip(times, most, strict=True)
    ]


def _adding_s_per_byte(clock: Clock[Any], device: torch.device) -> float:
    """Measure the seconds per byte of adding one large tensor to another."""
    total, more = torch.zeros(2, _ADDED_BYTES // 4, device=device)
    seconds = []
    for _ in range(5):
        clock.wait()
        start = clock.mark()
        total.add_(more)
        end = clock.mark()
        clock.wait()
        seconds.append(clock.seconds(start, end))
    return median(seconds) / _ADDED_BYTES


class AccumulationTimer:
    """Compares steps in which weights have gradients with steps in which they have none.

    Each timed step keeps the gradients of one half of the weights, in turn, and drops the others. Two steps thus see
    both cases of each layer, and neither takes much more memory than an ordinary step.
    """

    def __init__(self, clock: Clock[Any], layers: Layers) -> None:
        self._clock, self._layers = clock, layers
        sizes = [sum(parameter.nbytes for parameter in layer.values()) for layer in layers]
        self._second_half = [2 * done > sum(sizes) for done in accumulate(sizes)]
        self._steps: list[_Spans] = []

    @property
    def steps(self) -> int:
        """How many were timed; two at least see all layers."""
        return len(self._steps)

    def time(self, step: Callable[[], object]) -> None:
        """Run `step`, which does one backward; all weights must have gradients, of which half are dropped before."""
        kept = bool(self.steps % 2)
        for layer, second in zip(self._layers, self._second_half, strict=True):
            if second != kept:
                for parameter in layer.values():
                    parameter.grad = None
        hooks = _Hooks(self._clock, self._layers)
        try:
            step()
        finally:
            hooks.remove()
        self._clock.wait()
        self._steps.append(hooks.spans)

    def times(self) -> list[AccumulationTime] | None:
        """Return the difference of the medians by layer, 0 where noise makes it negative; None before two steps."""
        if self.steps < 2:
            return None
        seconds = self._differences(self._clock.seconds)
        if not isinstance(self._clock, CpuClock):
            return list(map(AccumulationTime, seconds))
        return list(map(AccumulationTime, seconds, self._differences(self._clock.thread_seconds)))

    def _differences(self, between: Callable[[Any, Any], float]) -> list[float]:
        """Return by layer how much longer the steps took that kept its half; both contain the hooks' own time."""
        taken: tuple[list[list[float]], list[list[float]]] = [], []
        for number, spans in enumerate(self._steps):
            seconds = [0.0] * len(self._layers)
            for layer, start, end in spans:
                seconds[layer] += between(start, end)
            taken[number % 2].append(seconds)
        # Medians, because a single interrupted step would otherwise outweigh the small difference.
        first, second = ([median(layer) for layer in zip(*half, strict=True)] for half in taken)
        return [
            max(0.0, later - earlier if is_second else earlier - later)
            for earlier, later, is_second in zip(first, second, self._second_half, strict=True)
        ]


class _Hooks:
    """Marks right before and right after each weight gets its gradient, until they are removed."""

    def __init__(self, clock: Clock[Any], layers: Layers) -> None:
        self._clock = clock
        self._handles: list[RemovableHandle] = []
        # Autograd frees an AccumulateGrad node that nobody holds, and makes another one without our hook.
        self._nodes: list[Any] = []
        self._began: dict[int, Any] = {}
        self.spans: _Spans = []
        for index, layer in enumerate(layers):
            for parameter in layer.values():
                # The node has no public name; the graph of any view of the weight leads to it.
                view = parameter.expand_as(parameter)
                assert view.grad_fn is not None
                node: Any = view.grad_fn.next_functions[0][0]
                self._nodes.append(node)
                self._handles += [
                    node.register_prehook(partial(self._begin, id(parameter))),
                    parameter.register_post_accumulate_grad_hook(partial(self._end, index)),  # type: ignore[no-untyped-call]
                ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()

    def _begin(self, parameter: int, _gradients: Sequence[Tensor]) -> None:
        self._began[parameter] = self._clock.mark()

    def _end(self, layer: int, parameter: Tensor) -> None:
        self.spans.append((layer, self._began.pop(id(parameter)), self._clock.mark()))


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
