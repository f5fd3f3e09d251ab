"""Time training steps on a device, as a whole or layer by layer."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from planner.errors import ModelFileError, reason_of
from planner.model.stage.parts import LayerObserver
from planner.runtime import runtime_of

MarkT = TypeVar("MarkT")
# is told the phase and how much of it is done, 0 to 1
ProgressCallback = Callable[[str, float], None]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    seconds: float  # until the repeat that exceeds them
    repeats: int  # at most
    least_repeats: int  # whatever the time
    # steps that do not count: the first ones allocate memory, fill caches and choose kernels
    warmup: int
    progress: ProgressCallback = field(default=lambda _phase, _done: None)


class HasBackward(Protocol):
    """A loss, or whatever else a backward begins from."""

    def backward(self) -> object:
        """Run it."""


Forward = Callable[[LayerObserver], HasBackward]  # tells the observer where each of its layers ends


class Clock:
    """Takes marks on a device, whose work between two of them is timed once it is done.

    A mark is an event, because to wait at each mark would add idle time on a GPU, and the time that
    this thread has had the processor, which means something where an operation is done when its
    call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = runtime_of(device)
        self.times_threads = not self._runtime.asynchronous

    def mark(self) -> Any:
        """Return the current point in the device's work."""
        event = self._runtime.event(timing=True)
        event.record()
        return event, time.thread_time()

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        self._runtime.synchronize(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks; call after `wait`."""
        return float(start[0].elapsed_time(end[0])) / 1e3

    def thread_seconds(self, start: Any, end: Any) -> float:
        """Return how long this thread had the processor, which leaves out other processes and other
        threads.

        The backward of CPU operations counts, because it runs in the thread that asks for it.
        """
        return float(end[1] - start[1])

    def median_s(self, action: Callable[[], object], repeats: int) -> float:
        """Return the median seconds of an action that is repeated, each time on an idle device."""
        seconds = []
        for _ in range(repeats):
            self.wait()
            start = self.mark()
            action()
            end = self.mark()
            self.wait()
            seconds.append(self.seconds(start, end))

        return median(seconds)


class LayerMarks(Generic[MarkT]):
    """Marks between the layers of one undivided forward and backward, which `run` takes.

    The stage calls `after_layer` between layers. In the backward, the operation of a layer that
    runs first is the one that ran last in its forward, because autograd takes the highest sequence
    number first. A hook before that operation marks where the layer's backward begins and the
    previous one ends, so the marks partition the backward.
    """

    def __init__(self, mark: Callable[[], MarkT], layers: int) -> None:
        self._mark = mark
        self._layers = layers
        self._forward: list[tuple[int, MarkT, MarkT]] = []
        self._backward: list[tuple[int, MarkT]] = []

    def run(self, forward: Forward) -> None:
        """Run a forward and its backward; raise ModelFileError if the backward fails, but not for
        want of memory.
        """
        self._start = self._mark()
        loss = forward(self)
        # Until the first hook, while autograd prepares, the backward counts for the last layer.
        self._backward.append((self._layers - 1, self._mark()))
        try:
            loss.backward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as cause:
            raise step_failure(cause) from cause

        self._backward.append((-1, self._mark()))

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """End the forward of layer `index`; `value` is the last of its results that a gradient
        returns to.
        """
        self._forward.append((index, self._start, self._mark()))
        if value is not None and value.grad_fn is not None:
            value.grad_fn.register_prehook(lambda _: self._backward.append((index, self._mark())))
        # A second mark, so that registering the hook counts for no layer.
        self._start = self._mark()

    @property
    def backward_start(self) -> MarkT:
        return self._backward[0][1]

    def spans(self) -> Iterator[tuple[int, bool, MarkT, MarkT]]:
        """Yield what was marked: the layer, whether it is its backward, the first mark and the
        last.
        """
        for layer, start, end in self._forward:
            yield layer, False, start, end
        for (layer, start), (_, end) in pairwise(self._backward):
            yield layer, True, start, end

    def sums(self, between: Callable[[MarkT, MarkT], float]) -> tuple[list[float], list[float]]:
        """Return the forward and backward of each layer, as sums of what `between` returns for each
        span.
        """
        forward = [0.0] * self._layers
        backward = [0.0] * self._layers
        for layer, in_backward, start, end in self.spans():
            (backward if in_backward else forward)[layer] += between(start, end)
        return forward, backward


# of a step's times, without the update
PARTS = ("forward_s", "backward_s", "forward_thread_s", "backward_thread_s")


@dataclass
class StepTimes:
    """Seconds of one part of the step, one entry per repeat."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    # Processor time of the thread, on a CPU; empty elsewhere.
    forward_thread_s: list[float] = field(default_factory=list)
    backward_thread_s: list[float] = field(default_factory=list)

    def median_s(self) -> float:
        """Return the median seconds of forward and backward together."""
        return median(map(sum, zip(self.forward_s, self.backward_s, strict=True)))


def step_failure(cause: Exception) -> ModelFileError:
    """Return the error for whatever PyTorch raises in a step of the user's model, too little memory
    included.
    """
    return ModelFileError(
        f"a training step of the model fails: {reason_of(cause)}",
        hint="run it on example_batch(n) without planner: forward, loss, backward and the "
        "optimizer's step",
    )


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let the next backward set the gradients of `parameters` instead of adding to them."""
    for parameter in parameters:
        parameter.grad = None


class Steps:
    """Runs and times steps, each with new gradients."""

    def __init__(
        self, clock: Clock, parameters: Iterable[nn.Parameter], update: Callable[[], object]
    ) -> None:
        self._clock = clock
        self._parameters = list(parameters)
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
        if clock.times_threads:
            times.forward_thread_s.append(clock.thread_seconds(start, after_forward))
            times.backward_thread_s.append(clock.thread_seconds(after_forward, after_backward))

    def marked(self, forward: Forward, times: Sequence[StepTimes]) -> None:
        """Time the pieces of one forward and backward."""
        drop_gradients(self._parameters)
        clock = self._clock
        clock.wait()
        marks = LayerMarks(clock.mark, len(times))
        marks.run(forward)
        clock.wait()
        for piece, forward_s, backward_s in zip(times, *marks.sums(clock.seconds), strict=True):
            piece.forward_s.append(forward_s)
            piece.backward_s.append(backward_s)

        if clock.times_threads:
            for piece, forward_s, backward_s in zip(
                times, *marks.sums(clock.thread_seconds), strict=True
            ):
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
        spent_share = 1.0
        if effort.seconds:
            spent_share = spent / effort.seconds
        effort.progress(phase, min(1.0, max(spent_share, done / effort.repeats)))
        for step in steps:
            step()
        done += 1
