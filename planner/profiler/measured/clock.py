"""Mark points in time on a device, and between the layers of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

MarkT = TypeVar("MarkT")


class Clock(Protocol[MarkT]):
    """Takes marks without waiting for the device; the time between two of them is read when it is done."""

    def mark(self) -> MarkT:
        """Return the current point in the device's work."""

    def wait(self) -> None:
        """Wait until the device has done all its work."""

    def seconds(self, start: MarkT, end: MarkT) -> float:
        """Return the time between two marks; call after `wait`."""


CpuMark = tuple[float, float]  # wall time and this thread's processor time, seconds


class CpuClock:
    """Wall time and the thread's processor time. A CPU operation is done when its call returns."""

    def mark(self) -> CpuMark:
        return time.perf_counter(), time.thread_time()

    def wait(self) -> None:
        return

    def seconds(self, start: CpuMark, end: CpuMark) -> float:
        return end[0] - start[0]

    def thread_seconds(self, start: CpuMark, end: CpuMark) -> float:
        """Return how long this thread had the processor, which leaves out other processes and other threads.

        The backward of CPU operations counts, because it runs in the thread that asks for it.
        """
        return end[1] - start[1]


class CudaClock:
    """Events in the current stream: kernels run asynchronously, and to wait at each mark would add idle time."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device) -> Clock[Any]:
    """Return the clock of `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()


class LayerMarks(Generic[MarkT]):
    """Marks between the layers of one undivided forward and backward.

    The stage calls `after_layer` between layers. In the backward, the operation of a layer that runs first is the one
    that ran last in its forward, because autograd takes the highest sequence number first. A hook before that
    operation marks where the layer's backward begins and the previous one ends, so the marks partition the backward.
    """

    def __init__(self, mark: Callable[[], MarkT], layers: int) -> None:
        self._mark = mark
        self._layers = layers
        self._forward: list[tuple[int, MarkT, MarkT]] = []
        self._backward: list[tuple[int, MarkT]] = []
        self._start = mark()

    def start(self) -> None:
        """Begin the forward."""
        self._start = self._mark()

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """End the forward of layer `index`; `value` is the last of its results that a gradient returns to."""
        self._forward.append((index, self._start, self._mark()))
        if value is not None and value.grad_fn is not None:
            value.grad_fn.register_prehook(partial(self._before_backward, index))
        # A second mark, so that registering the hook counts for no layer.
        self._start = self._mark()

    def start_backward(self) -> None:
        """Begin the backward; until the first hook, while autograd prepares, it counts for the last layer."""
        self._backward.append((self._layers - 1, self._mark()))

    def end(self) -> None:
        """End the backward."""
        self._backward.append((-1, self._mark()))

    def spans(self) -> Iterator[tuple[int, bool, MarkT, MarkT]]:
        """Yield what was marked: the layer, whether it is its backward, the first mark and the last."""
        for layer, start, end in self._forward:
            yield layer, False, start, end
        for (layer, start), (_, end) in pairwise(self._backward):
            yield layer, True, start, end

    def sums(self, between: Callable[[MarkT, MarkT], float]) -> tuple[list[float], list[float]]:
        """Return the forward and backward of each layer, as sums of what `between` returns for each span."""
        forward, backward = [0.0] * self._layers, [0.0] * self._layers
        for layer, in_backward, start, end in self.spans():
            (backward if in_backward else forward)[layer] += between(start, end)
        return forward, backward

    def _before_backward(self, index: int, _gradients: Sequence[Tensor]) -> None:
        self._backward.append((index, self._mark()))


def layer_flops(marks: LayerMarks[MarkT], total: Callable[[MarkT], int]) -> list[tuple[int, int]]:
    """Return the FLOPs of each layer's forward and backward, where `total` reads those until a mark."""
    forward, backward = marks.sums(lambda start, end: float(total(end) - total(start)))
    return [(round(ahead), round(back)) for ahead, back in zip(forward, backward, strict=True)]
