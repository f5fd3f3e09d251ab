"""Marks between layers partition the forward and the backward."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.stage.parts import OBSERVABLE, LayerObserver
from planner.model.stage.stage import build_stage
from planner.profiler.step.timing import Clock, LayerMarks

NAP_S = 0.02


class _Slow(torch.autograd.Function):
    """Sleeps in the backward of one layer."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, *gradients: Tensor) -> Tensor:
        time.sleep(NAP_S)
        return gradients[0]


class _FakeClock:
    """Counts marks instead of time."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


def _chain(count: int) -> list[Tensor]:
    values = [torch.ones(3, requires_grad=True)]
    for _ in range(count):
        values.append(values[-1] * 2)
    return values[1:]


def test_a_slow_backward_is_put_on_its_layer() -> None:
    clock = Clock(torch.device("cpu"))
    marks = LayerMarks(clock.mark, 3)

    def forward(observer: LayerObserver) -> Tensor:
        first = torch.ones(3, requires_grad=True) * 2
        observer.after_layer(0, first)
        slow: Tensor = _Slow.apply(first)  # type: ignore[no-untyped-call]
        observer.after_layer(1, slow)
        last = slow.sum()
        observer.after_layer(2, last)
        return last

    marks.run(forward)
    _, backward = marks.sums(clock.seconds)
    assert backward[1] >= NAP_S
    assert backward[0] < NAP_S
    assert backward[2] < NAP_S


def test_marks_partition_the_whole() -> None:
    clock = _FakeClock()
    marks = LayerMarks(clock.mark, 4)

    def forward(observer: LayerObserver) -> Tensor:
        for index, value in enumerate(_chain(4)):
            observer.after_layer(index, value)
            last = value
        return last.sum()

    marks.run(forward)
    _, backward = marks.sums(clock.seconds)
    assert sum(backward) == clock.now - marks.backward_start
    assert all(seconds >= 1 for seconds in backward)


def test_layers_without_gradient_take_no_backward() -> None:
    clock = _FakeClock()
    marks = LayerMarks(clock.mark, 3)

    def forward(observer: LayerObserver) -> Tensor:
        observer.after_layer(0, None)
        first, last = _chain(2)
        observer.after_layer(1, first)
        observer.after_layer(2, last)
        return last.sum()

    marks.run(forward)
    assert marks.sums(clock.seconds)[1][0] == 0


def test_a_stage_reports_each_layer_once_in_order() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool]] = []

        def after_layer(self, index: int, value: Tensor | None) -> None:
            self.seen.append((index, value is not None and value.grad_fn is not None))

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    batch = Batch((torch.randn(3, 4),), {}, torch.randint(0, 2, (3,)))
    graph = capture(model, batch, nn.functional.cross_entropy)
    names = [layer.name for layer in graph.layers]
    recorder = Recorder()
    stage = build_stage(graph, names[1:], variant=OBSERVABLE)
    stage.set_observer(recorder)
    with pytest.raises(KeyError):  # the value that the first layer makes
        stage(batch, {})
    stage(batch, {stage.received[0].name: torch.randn(3, 4, requires_grad=True)})
    assert recorder.seen == [(1, True), (2, True), (3, True)]
    silent = build_stage(graph, names)
    silent.set_observer(recorder)
    silent(batch, {})
    assert len(recorder.seen) == 3
