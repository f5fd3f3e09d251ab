"""Run training steps and time them, as a whole or layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from planner.errors import ModelFileError, reason_of
from planner.model.stage.parts import LayerObserver
from planner.profiler.measured.clock import Clock, CpuClock, LayerMarks

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
