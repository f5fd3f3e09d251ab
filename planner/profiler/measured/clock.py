"""Points in time on a device, and the layers' times made of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

MarkT = TypeVar("MarkT")


class Clock(Protocol[MarkT]):
    """Takes marks while the device works; what lies between two of them is read when it is done."""

    def mark(self) -> MarkT:
        """A point in the device's work, now."""
        ...

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        ...

    def seconds(self, start: MarkT, end: MarkT) -> float:
        """Time between two marks; call after `wait`."""
        ...


CpuMark = tuple[float, float]  # wall time and this thread's processor time, seconds


class CpuClock:
    """Wall time, and beside it the thread's: a CPU operation is done when its call returns."""

    def mark(self) -> CpuMark:
        return time.perf_counter(), time.thread_time()

    def wait(self) -> None:
        return

    def seconds(self, start: CpuMark, end: CpuMark) -> float:
        return end[0] - start[0]

    def thread_seconds(self, start: CpuMark, end: CpuMark) -> float:
        """Time that this thread had the processor: what other processes do does not count, other threads do not either.

        The backward of CPU operations runs in the thread that asks for it.
        """
        return end[1] - start[1]


class CudaClock:
    """Events in the current stream, so that marks do not stop the device."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device) -> Clock[Any]:
    """The clock of `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()


class LayerTimes(Generic[MarkT]):
    """Times of each layer within one undivided forward and backward.

    The stage calls `after_layer` between layers. In the backward, the first operation of a layer to run is that which
    ran last in its forward: autograd takes the highest sequence number first. A hook before it marks where
    the layer's backward begins, and the next mark where it ends; so the marks partition the whole backward.
    """

    def __init__(self, clock: Clock[MarkT], layers: int) -> None:
        self._clock = clock
        self._layers = layers
        self._forward: list[tuple[int, MarkT, MarkT]] = []
        self._backward: list[tuple[int, MarkT]] = []
        self._start = clock.mark()

    def start(self) -> None:
        """The forward begins."""
        self._start = self._clock.mark()

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """Layer `index` has run; `value` is the last of its results that a gradient returns to."""
        self._forward.append((index, self._start, self._clock.mark()))
        if value is not None and value.grad_fn is not None:
            value.grad_fn.register_prehook(partial(self._before_backward, index))
        self._start = self._clock.mark()

    def start_backward(self) -> None:
        """The backward begins; until the first layer's hook, autograd prepares for it."""
        self._backward.append((self._layers - 1, self._clock.mark()))

    def end(self) -> None:
        """The backward has ended."""
        self._backward.append((-1, self._clock.mark()))

    def seconds(self, between: Callable[[MarkT, MarkT], float] | None = None) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of each layer; call when the device is done.

        Args:
            between: seconds between two marks; None for the clock's own.
        """
        between = between or self._clock.seconds
        forward = [0.0] * self._layers
        for index, start, end in self._forward:
            forward[index] += between(start, end)
        backward: dict[int, float] = defaultdict(float)
        for (index, start), (_, end) in zip(self._backward, self._backward[1:], strict=False):
            backward[index] += between(start, end)
        return forward, [backward[index] for index in range(self._layers)]

    def _before_backward(self, index: int, _gradients: Sequence[Tensor]) -> None:
        self._backward.append((index, self._clock.mark()))
