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
from itertools import accumulate
from statistics import median
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from planner.profiler.measured.clock import Clock, CpuClock

Layers = Sequence[Mapping[str, nn.Parameter]]  # trained parameters by name, per layer
_Spans = list[tuple[int, Any, Any]]  # of one backward: layer, and marks before and after each of its weights


@dataclass(frozen=True)
class AddingTime:
    """Seconds by which adding a layer's gradients to others takes longer than making them.

    `thread_seconds`: that the thread had the processor, on a CPU.
    """

    seconds: float = 0.0
    thread_seconds: float | None = None


class AddingTimes:
    """Seconds that each layer's gradients take to be handed over, to weights that have some already and that have none.

    Half of the gradients are kept at a time, so that a step that adds takes little more memory than others.

    Args:
        clock: of the weights' device.
        layers: the weights.
    """

    def __init__(self, clock: Clock[Any], layers: Layers) -> None:
        self._clock, self._layers = clock, layers
        sizes = [sum(parameter.nbytes for parameter in layer.values()) for layer in layers]
        self._second_half = [2 * done > sum(sizes) for done in accumulate(sizes)]
        self._noted: list[_Spans] = []

    @property
    def steps(self) -> int:
        """How many were noted; two at least tell something of all layers."""
        return len(self._noted)

    def note(self, step: Callable[[], object]) -> None:
        """Run a step with one backward; all weights must have gradients, of which one half or the other are dropped."""
        kept = bool(self.steps % 2)
        for layer, second in zip(self._layers, self._second_half, strict=True):
            if second != kept:
                for parameter in layer.values():
                    parameter.grad = None
        with _Hooks(self._clock, self._layers) as hooks:
            step()
        self._clock.wait()
        self._noted.append(hooks.spans)

    def times(self) -> list[AddingTime] | None:
        """By layer, the difference of the medians; 0 where noise makes it negative. None after fewer than two steps."""
        if self.steps < 2:
            return None
        seconds = self._differences(self._clock.seconds)
        if not isinstance(self._clock, CpuClock):
            return list(map(AddingTime, seconds))
        return list(map(AddingTime, seconds, self._differences(self._clock.thread_seconds)))

    def _differences(self, between: Callable[[Any, Any], float]) -> list[float]:
        """By layer, how much longer it took in steps that kept its half. The hooks' own time is in both."""
        taken: tuple[list[list[float]], list[list[float]]] = [], []
        for number, spans in enumerate(self._noted):
            seconds = [0.0] * len(self._layers)
            for layer, start, end in spans:
                seconds[layer] += between(start, end)
            taken[number % 2].append(seconds)
        first, second = ([median(layer) for layer in zip(*half, strict=True)] for half in taken)
        return [
            max(0.0, later - earlier if is_second else earlier - later)
            for earlier, later, is_second in zip(first, second, self._second_half, strict=True)
        ]


class _Hooks:
    """Marks right before and right after each weight gets its gradient, within its context."""

    def __init__(self, clock: Clock[Any], layers: Layers) -> None:
        self._clock, self._layers = clock, layers
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []  # autograd makes others, without hooks, if nobody keeps them
        self._began: dict[int, Any] = {}
        self.spans: _Spans = []

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

    def _begin(self, parameter: int, _gradients: Sequence[Tensor]) -> None:
        self._began[parameter] = self._clock.mark()

    def _end(self, layer: int, parameter: Tensor) -> None:
        self.spans.append((layer, self._began.pop(id(parameter)), self._clock.mark()))
