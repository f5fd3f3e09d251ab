"""Time training steps on a device, as a whole or layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from planner.errors import ModelFileError, reason_of
from planner.model.stage.parts import LayerObserver

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


ProgressCallback = Callable[[str, float], None]  # is told the phase and how much of it is done, 0 to 1


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: stop after the repeat that exceeds them.
        repeats: at most.
        least_repeats: at least, whatever the time.
        warmup: steps that do not count. The first ones allocate memory, fill caches and choose kernels.
        progress: is told the phase and how much of it is done.
    """

    seconds: float
    repeats: int
    least_repeats: int
    warmup: int
    progress: ProgressCallback = field(default=lambda _phase, _done: None)


class HasBackward(Protocol):
    """A loss, or whatever else a backward begins from."""

    def backward(self) -> object:
        """Run it."""


@dataclass
class StepTimes:
    """Seconds of one part of the step, one entry per repeat."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    # Processor time of the thread, on a CPU; empty elsewhere.
    forward_thread_s: list[float] = field(default_factory=list)
    backward_thread_s: list[float] = field(default_factory=list)


def step_failure(cause: Exception) -> ModelFileError:
    """Return the error for whatever PyTorch raises in a step of the user's model, too little memory included."""
    return ModelFileError(
        f"a training step of the model fails: {reason_of(cause)}",
        hint="run it on example_batch(n) without planner: forward, loss, backward and the optimizer's step",
    )


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let the next backward set the gradients of `parameters` instead of adding to them."""
    for parameter in parameters:
        parameter.grad = None


class Steps:
    """Runs and times steps, each with new gradients."""

    def __init__(self, clock: Clock[Any], parameters: Sequence[nn.Parameter], update: Callable[[], object]) -> None:
        self._clock = clock
        self._parameters = parameters
        self.update = update

    def whole(self, forward: Callable[[], HasBackward], times: StepTimes) -> None:
        """Time one step without marks inside; `forward` returns the loss."""
        drop_gradients(self._parameters)
        clock = self._clock
        clock.wait()
        start = clock.mark()
        loss = forward()
        after_forward = clock.mark()
        loss.backward()
        after_backward = clock.mark()
        self.update()
        end = clock.mark()
        clock.wait()
        times.forward_s.append(clock.seconds(start, after_forward))
        times.backward_s.append(clock.seconds(after_forward, after_backward))
        times.update_s.append(clock.seconds(after_backward, end))
        if isinstance(clock, CpuClock):
            times.forward_thread_s.append(clock.thread_seconds(start, after_forward))
            times.backward_thread_s.append(clock.thread_seconds(after_forward, after_backward))

    def marked(self, forward: Callable[[LayerObserver], HasBackward], times: Sequence[StepTimes]) -> None:
        """Time the pieces of one forward and backward; `forward` tells the observer where each piece ends."""
        drop_gradients(self._parameters)
        clock = self._clock
        clock.wait()
        marks = LayerMarks(clock.mark, len(times))
        marks.start()
        loss = forward(marks)
        marks.start_backward()
        loss.backward()
        marks.end()
        clock.wait()
        for piece, forward_s, backward_s in zip(times, *marks.sums(clock.seconds), strict=True):
            piece.forward_s.append(forward_s)
            piece.backward_s.append(backward_s)
        if isinstance(clock, CpuClock):
            for piece, forward_s, backward_s in zip(times, *marks.sums(clock.thread_seconds), strict=True):
                piece.forward_thread_s.append(forward_s)
                piece.backward_thread_s.append(backward_s)


def repeat(effort: Effort, phase: str, steps: Sequence[Callable[[], None]]) -> None:
    """Run `steps` in turn, so that whatever else the machine does slows all of them alike."""
    started = time.perf_counter()
    done = 0
    while done < effort.repeats:
        spent = time.perf_counter() - started
        if done >= effort.least_repeats and spent >= effort.seconds:
            break
        spent_share = spent / effort.seconds if effort.seconds else 1.0
        effort.progress(phase, min(1.0, max(spent_share, done / effort.repeats)))
        for step in steps:
            step()
        done += 1
