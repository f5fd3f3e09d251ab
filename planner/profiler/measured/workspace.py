"""The most that a training step has allocated at once, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.utils._pytree import tree_leaves

from planner.model.batch import Batch
from planner.model.stage.parts import LOSS
from planner.model.stage.stage import StageModule

_MARK = "planner: between layers"
_MEMORY = "[memory]"


def workspace_bytes(
    stage: StageModule, batch: Batch, saved_bytes: Sequence[int], gradient_bytes: Sequence[int]
) -> list[int]:
    """By layer, what its forward or its backward has allocated at its peak beyond what the step holds anyway.

    That is what is saved of this layer and earlier ones, the gradients of this layer's weights and of later ones',
    and all weights. The step is run once, so warm up before: what libraries allocate once and keep would count.

    Args:
        stage: the whole model, built with an observer; its weights must have no gradients.
        batch: on the stage's device.
        saved_bytes: by layer, as `planner.profiler.measured.saved` counts them.
        gradient_bytes: of the weights, by layer.
    """
    device = next((parameter.device for parameter in stage.parameters()), torch.device("cpu"))
    meter = meter_for(device)
    marks = _Marks(meter, len(saved_bytes))
    stage.set_observer(marks)
    with meter:
        marks.start()
        loss: Tensor = stage(batch, {})[LOSS]
        marks.start_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        marks.end()
    stage.set_observer(None)
    batch_bytes = sum(leaf.nbytes for leaf in tree_leaves((batch.args, batch.kwargs, batch.target)) if _is_tensor(leaf))
    saved = list(accumulate(saved_bytes))
    made = list(accumulate(reversed(gradient_bytes)))[::-1]
    most = [0] * len(saved)
    for (index, backward), peak in zip(marks.spans, meter.peaks(), strict=True):
        # The batch was there before the step, but in training it comes with it.
        beyond = peak + batch_bytes - saved[index] - (made[index] if backward else 0)
        most[index] = max(most[index], beyond)
    return most


class Meter(Protocol):
    """Knows the bytes allocated within its context, relative to the beginning."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> object: ...

    def mark(self) -> None:
        """End a span; the first one begins with the context."""

    def peaks(self) -> list[int]:
        """The most within each span."""
        ...


def meter_for(device: torch.device) -> Meter:
    """What measures allocations on `device`."""
    return _CudaMeter(device) if device.type == "cuda" else _CpuMeter()


class _CudaMeter:
    """The caching allocator's peak: it counts when memory is asked for, so the device need not be waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: list[int] = []
        self._before_bytes = 0

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before_bytes = torch.cuda.memory_allocated(self._device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def mark(self) -> None:
        self._peaks.append(torch.cuda.max_memory_allocated(self._device) - self._before_bytes)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> list[int]:
        return self._peaks


class _CpuMeter:
    """What PyTorch's profiler sees of the allocator, that of oneDNN's operations included."""

    def __init__(self) -> None:
        # Otherwise the library says on stderr that it starts and stops. It reads this when it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(use_kineto=False, profile_memory=True)

    def __enter__(self) -> None:
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        with record_function(_MARK):
            pass

    def peaks(self) -> list[int]:
        assert self._profile.kineto_results is not None
        everything: list[Any] = self._profile.kineto_results.events()
        events = [each for each in everything if each.name() in (_MARK, _MEMORY)]
        peaks, now, most = [], 0, 0
        for event in sorted(events, key=lambda each: each.start_ns()):
            if event.name() == _MARK:
                peaks.append(most)
                most = now
            else:
                now += event.nbytes()
                most = max(most, now)
        return peaks


class _Marks:
    """Ends a span wherever one layer's forward or backward ends; see `planner.profiler.measured.clock.LayerTimes`."""

    def __init__(self, meter: Meter, layers: int) -> None:
        self._meter = meter
        self.spans: list[tuple[int, bool]] = []  # layer, and whether it is its backward
        self._running = layers - 1

    def start(self) -> None:
        """The forward begins; what was before is no layer's."""
        self._end(0, backward=False)

    def after_layer(self, index: int, value: Tensor | None) -> None:
        """Layer `index` has run; `value` is the last of its results that a gradient returns to."""
        self._end(index, backward=False)
        if value is not None and value.grad_fn is not None:
            value.grad_fn.register_prehook(partial(self._before_backward, index))

    def start_backward(self) -> None:
        """Until the first layer's hook, autograd prepares for the last one."""
        self._end(self._running, backward=False)

    def end(self) -> None:
        """The backward has ended."""
        self._end(self._running, backward=True)

    def _before_backward(self, index: int, _gradients: Sequence[Tensor]) -> None:
        self._end(self._running, backward=True)
        self._running = index

    def _end(self, index: int, *, backward: bool) -> None:
        self._meter.mark()
        self.spans.append((index, backward))


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)
