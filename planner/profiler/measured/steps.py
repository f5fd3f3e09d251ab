"""Training steps, timed as a whole or piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from planner.errors import ModelFileError
from planner.model.stage.stage import LayerObserver
from planner.profiler.measured.clock import Clock, CpuClock, LayerTimes

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: stop after the repeat that exceeds them.
        repeats: at most.
        least_repeats: at least, whatever the time.
        warmup: steps that do not count.
    """

    seconds: float
    repeats: int
    least_repeats: int
    warmup: int


@dataclass
class StepTimes:
    """Seconds of one part of the step, one entry per repeat."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    # On a CPU, time that the thread had the processor; empty elsewhere.
    forward_thread_s: list[float] = field(default_factory=list)
    backward_thread_s: list[float] = field(default_factory=list)


def step_failure(cause: Exception) -> ModelFileError:
    """The error for whatever PyTorch raises in a step of the user's model, too little memory included."""
    reason = (str(cause).strip().splitlines() or [""])[0]
    return ModelFileError(
        f"a training step of the model fails: {type(cause).__name__}: {reason}",
        hint="run it on example_batch(n) without planner: forward, loss, backward and the optimizer's step",
    )


class Steps:
    """Runs and times steps.

    Args:
        clock: of the device.
        parameters: whose gradients each step makes anew.
    """

    def __init__(self, clock: Clock[Any], parameters: Sequence[nn.Parameter]) -> None:
        self.clock = clock
        self._parameters = parameters

    def whole(self, forward: Callable[[], Tensor], update: Callable[[], object], times: StepTimes) -> None:
        """One step without marks inside; `forward` returns the loss."""
        self.drop_gradients()
        clock = self.clock
        clock.wait()
        start = clock.mark()
        loss = forward()
        after_forward = clock.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        after_backward = clock.mark()
        update()
        end = clock.mark()
        clock.wait()
        times.forward_s.append(clock.seconds(start, after_forward))
        times.backward_s.append(clock.seconds(after_forward, after_backward))
        times.update_s.append(clock.seconds(after_backward, end))
        if isinstance(clock, CpuClock):
            times.forward_thread_s.append(clock.thread_seconds(start, after_forward))
            times.backward_thread_s.append(clock.thread_seconds(after_forward, after_backward))

    def marked(self, forward: Callable[[LayerObserver], Tensor], times: Sequence[StepTimes]) -> None:
        """One forward and backward with marks between the pieces, of whose ends `forward` tells the observer."""
        self.drop_gradients()
        clock = self.clock
        clock.wait()
        marks = LayerTimes(clock, len(times))
        marks.start()
        loss = forward(marks)
        marks.start_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        marks.end()
        clock.wait()
        for piece, forward_s, backward_s in zip(times, *marks.seconds(), strict=True):
            piece.forward_s.append(forward_s)
            piece.backward_s.append(backward_s)
        if isinstance(clock, CpuClock):
            for piece, forward_s, backward_s in zip(times, *marks.seconds(clock.thread_seconds), strict=True):
                piece.forward_thread_s.append(forward_s)
                piece.backward_thread_s.append(backward_s)

    def drop_gradients(self) -> None:
        """As before each step."""
        for parameter in self._parameters:
            parameter.grad = None


def repeat(effort: Effort, progress: Progress, phase: str, steps: Sequence[Callable[[], None]]) -> None:
    """Run `steps` in turn, so that whatever else the machine does slows all of them alike."""
    started = time.perf_counter()
    done = 0
    while done < effort.repeats:
        spent = time.perf_counter() - started
        if done >= effort.least_repeats and spent >= effort.seconds:
            break
        progress(phase, min(1.0, max(spent / effort.seconds if effort.seconds else 1.0, done / effort.repeats)))
        for step in steps:
            step()
        done += 1
