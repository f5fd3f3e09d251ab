"""How long it takes to add the gradients of weights to those that are there already, layer by layer.

The first backward after an update hands its gradients over; every further one before the next update adds to them: it
reads both and writes the sum. Autograd does that for each weight as soon as its gradient is complete, so hooks right
before and right after see it by itself, within a training step and with the caches as they are then. The difference of
two whole backwards drowns in their noise: it is 8 ms of 90 on VGG-16, 90% of which the hooks see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from planner.profiler.clock import Clock, CpuClock

Layers = Sequence[Mapping[str, nn.Parameter]]  # trained parameters by name, per layer


@dataclass(frozen=True)
class AddingTime:
    """Seconds by which adding a layer's gradients to others takes longer than making them.

    `thread_seconds`: that the thread had the processor, on a CPU.
    """

    seconds: float = 0.0
    thread_seconds: float | None = None


class AddingTimes:
    """Seconds that each layer's gradients take to be handed over, to weights that have some already and that have none.

    Args:
        clock: of the weights' device.
        layers: the weights.
    """

    def __init__(self, clock: Clock[Any], layers: Layers) -> None:
        self._clock, self._layers = clock, layers
        # Per backward, the seconds of each layer.
        self._made: list[list[float]] = []
        self._added: list[list[float]] = []
        self._made_thread: list[list[float]] = []
        self._added_thread: list[list[float]] = []

    @property
    def backwards(self) -> int:
        """How many that added were noted."""
        return len(self._added)

    def note(self, step: Callable[[], object], *, adds: bool) -> None:
        """Run a step with one backward; `adds`: all weights have gradients before, else none has."""
        with _Hooks(self._clock, self._layers) as hooks:
            step()
        self._clock.wait()
        (self._added if adds else self._made).append(hooks.seconds(self._clock.seconds))
        if isinstance(self._clock, CpuClock):
            (self._added_thread if adds else self._made_thread).append(hooks.seconds(self._clock.thread_seconds))

    def times(self) -> list[AddingTime] | None:
        """By layer, 0 where noise makes it negative; None where no backward added."""
        if not self._added:
            return None
        seconds = _difference(self._made, self._added)
        if not self._added_thread:
            return list(map(AddingTime, seconds))
        return list(map(AddingTime, seconds, _difference(self._made_thread, self._added_thread)))


def _difference(made: Sequence[Sequence[float]], added: Sequence[Sequence[float]]) -> list[float]:
    """Of medians over the backwards, by layer, which leaves out the hooks' own time; that is little."""
    longer = [median(layer) for layer in zip(*added, strict=True)]
    shorter = [median(layer) for layer in zip(*made, strict=True)] or [0.0] * len(longer)
    return [max(0.0, more - less) for more, less in zip(longer, shorter, strict=True)]


class _Hooks:
    """Marks right before and right after each weight gets its gradient, within its context."""

    def __init__(self, clock: Clock[Any], layers: Layers) -> None:
        self._clock, self._layers = clock, layers
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []  # autograd makes others, without hooks, if nobody keeps them
        self._began: dict[int, Any] = {}
        self._spans: list[tuple[int, Any, Any]] = []

    def __enter__(self) -> _Hooks:
        for index, layer in enumerate(self._layers):
            for parameter in layer.values():
                view = parameter.expand_as(parameter)
                assert view.grad_fn is not None
                node: Any = view.grad_fn.next_functions[0][0]
                self._nodes.append(node)
                self._handles += [
                    node.register_prehook(partial(self._begin, id(parameter))),
                    parameter.register_post_accumulate_grad_hook(partial(self._end, index)),  # type: ignore[no-untyped-call]
                ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()

    def seconds(self, between: Callable[[Any, Any], float]) -> list[float]:
        """By layer; call when the device is done."""
        seconds = [0.0] * len(self._layers)
        for layer, start, end in self._spans:
            seconds[layer] += between(start, end)
        return seconds

    def _begin(self, parameter: int, _gradients: Sequence[Tensor]) -> None:
        self._began[parameter] = self._clock.mark()

    def _end(self, layer: int, parameter: Tensor) -> None:
        self._spans.append((layer, self._began.pop(id(parameter)), self._clock.mark()))
