"""Measure the optimizer's step and gradient accumulation, layer by layer.

The first backward after an update sets the gradients. Each further one before the next update adds to them: it reads
both and writes the sum. Autograd does so for a weight as soon as its gradient is complete. Hooks right before and right
after therefore time it alone, within a training step, with the caches as they are then. The difference between two
whole backwards would drown in noise: it is 8 ms of 90 on VGG-16, of which the hooks see 90%.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from planner.model.spec import TrainingSpec
from planner.profiler.step.allocation import meter_for
from planner.profiler.step.timing import Clock, drop_gradients

Layers = Sequence[Mapping[str, nn.Parameter]]  # trained parameters by name, per layer
_GENEROUS = 2.0  # times what a large tensor needs per byte: the gradients lie in several places
_CALL_S = 50e-6  # for each weight, whose addition is a call of its own
_ADDED_BYTES = 32 * 2**20  # more than the caches hold
_ADDITIONS, _UPDATES = 5, 3  # that are timed
_LEAST_METERED_BYTES = 10**6
_Spans = list[tuple[int, Any, Any]]  # of one backward: layer, and marks before and after each of its weights


@dataclass(frozen=True)
class AccumulationTime:
    """Seconds by which adding to a layer's gradients takes longer than setting them.

    `thread_seconds`: processor time of the thread, on a CPU.
    """

    seconds: float = 0.0
    thread_seconds: float | None = None


def bounded(times: Sequence[AccumulationTime], layers: Layers, clock: Clock) -> list[AccumulationTime]:
    """Return the times, each at most what the memory needs to read both gradients and to write their sum.

    On a busy machine the difference of two medians is noise where a layer's gradients are small.
    """
    devices = [parameter.device for layer in layers for parameter in layer.values()]
    if not devices or not any(each.seconds for each in times):
        return list(times)
    total, more = torch.zeros(2, _ADDED_BYTES // 4, device=devices[0])
    per_byte_s = clock.median_s(lambda: total.add_(more), _ADDITIONS) / _ADDED_BYTES
    found = []
    for each, layer in zip(times, layers, strict=True):
        size = sum(parameter.nbytes for parameter in layer.values())
        limit_s = _GENEROUS * per_byte_s * size + _CALL_S * len(layer)
        thread_s = None if each.thread_seconds is None else min(each.thread_seconds, limit_s)
        found.append(AccumulationTime(min(each.seconds, limit_s), thread_s))
    return found


class AccumulationTimer:
    """Compares steps in which weights have gradients with steps in which they have none.

    Each timed step keeps the gradients of one half of the weights, in turn, and drops the others. Two steps thus see
    both cases of each layer, and neither takes much more memory than an ordinary step.
    """

    def __init__(self, clock: Clock, layers: Layers) -> None:
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
                drop_gradients(layer.values())
        with self._hooks() as spans:
            step()
        self._clock.wait()
        self._steps.append(spans)

    @contextmanager
    def _hooks(self) -> Iterator[_Spans]:
        """Take marks right before and right after each weight gets its gradient within the context."""
        began: dict[int, Any] = {}
        spans: _Spans = []
        handles, nodes = [], []

        def begin(weight: int, _gradients: Sequence[Tensor]) -> None:
            began[weight] = self._clock.mark()

        def end(layer: int, weight: Tensor) -> None:
            spans.append((layer, began.pop(id(weight)), self._clock.mark()))

        for index, layer in enumerate(self._layers):
            for weight in layer.values():
                # The node has no public name; the graph of any view of the weight leads to it.
                view = weight.expand_as(weight)
                assert view.grad_fn is not None
                node: Any = view.grad_fn.next_functions[0][0]
                # Autograd frees an AccumulateGrad node that nobody holds, and makes another one without our hook.
                nodes.append(node)
                handles.append(node.register_prehook(partial(begin, id(weight))))
                handles.append(weight.register_post_accumulate_grad_hook(partial(end, index)))  # type: ignore[no-untyped-call]
        try:
            yield spans
        finally:
            for handle in handles:
                handle.remove()

    def times(self) -> list[AccumulationTime] | None:
        """Return the difference of the medians by layer, 0 where noise makes it negative; None before two steps."""
        if self.steps < 2:
            return None
        seconds = self._differences(self._clock.seconds)
        if not self._clock.times_threads:
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


def layer_updates(spec: TrainingSpec, layers: Layers, clock: Clock, device: torch.device) -> list[LayerUpdate]:
    """Measure a step on the parameters of each layer, which must have gradients."""
    times = []
    for parameters in layers:
        if not parameters:
            times.append((0.0, 0))
            continue
        optimizer = _begun(spec, parameters)
        times.append((clock.median_s(optimizer.step, _UPDATES), state_bytes_of(optimizer)))
    # Metered after all are timed, because metering slows steps down.
    sizes = update_workspaces(spec, layers, device)
    return [LayerUpdate(*update, size) for update, size in zip(times, sizes, strict=True)]


def update_workspaces(spec: TrainingSpec, layers: Layers, device: torch.device) -> list[int]:
    """Return the most that a step on each layer's parameters, which must have gradients, allocates beyond its state."""
    sizes = []
    for parameters in layers:
        # Metering takes longer than a small step itself, whose workspace is of a parameter's size and thus negligible.
        if sum(parameter.nbytes for parameter in parameters.values()) < _LEAST_METERED_BYTES:
            sizes.append(0)
            continue
        optimizer, meter = _begun(spec, parameters), meter_for(device)
        with meter:
            meter.mark()
            optimizer.step()
            meter.mark()
        sizes.append(meter.peaks()[1])
    return sizes


def _begun(spec: TrainingSpec, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """Return an optimizer that has taken one step, which creates its state."""
    optimizer = still(spec.optimizer(parameters))
    optimizer.step()
    return optimizer


def state_bytes_of(optimizer: Optimizer) -> int:
    """Return the bytes of the tensors that the optimizer keeps between steps."""
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in state)
