"""Training steps of the unsplit model, timed as a whole and layer by layer in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from planner.errors import ModelFileError
from planner.model.autocast import autocasting
from planner.model.batch import Batch
from planner.model.capture import loss_of
from planner.model.file import ModelFile
from planner.model.graph import LayerGraph
from planner.model.stage import StageModule, build_stage
from planner.profiler.clock import Clock, CpuClock, LayerTimes, MarkT, clock_for
from planner.profiler.saved import saved_bytes
from planner.profiler.update import LayerUpdate, layer_updates, still

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


@dataclass(frozen=True)
class Measurement:
    """All that was measured; per-layer lists are in the order of the layers.

    Attributes:
        layers: per layer, over the repeats of the marked steps.
        whole: the user's model without capture or marks, in between.
        updates: per layer, of the optimizer.
        saved_bytes: per layer.
    """

    layers: list[StepTimes]
    whole: StepTimes
    updates: list[LayerUpdate]
    saved_bytes: list[int]


def measure(
    graph: LayerGraph, model_file: ModelFile, batch: Batch, device: torch.device, effort: Effort, progress: Progress
) -> Measurement:
    """Run and time training steps of `graph` on `batch`."""
    graph.model.to(device)
    batch = batch.to(device)
    stage = build_stage(graph, [layer.name for layer in graph.layers], observable=True).to(device)
    try:
        return _Run(graph, stage, model_file, batch, effort, progress).measure(clock_for(device))
    except RuntimeError as cause:  # whatever PyTorch raises in the user's model, too little memory included
        reason = (str(cause).strip().splitlines() or [""])[0]
        raise ModelFileError(
            f"a training step of the model fails: {type(cause).__name__}: {reason}",
            hint="run it on example_batch(n) without planner: forward, loss, backward and the optimizer's step",
        ) from cause


class _Run:
    def __init__(
        self,
        graph: LayerGraph,
        stage: StageModule,
        model_file: ModelFile,
        batch: Batch,
        effort: Effort,
        progress: Progress,
    ) -> None:
        self._graph = graph
        self._stage = stage
        self._model_file = model_file
        self._batch = batch
        self._effort = effort
        self._progress = progress
        self._parameters = {name: p for name, p in graph.model.named_parameters() if p.requires_grad}

    def measure(self, clock: Clock[MarkT]) -> Measurement:
        saved = saved_bytes(self._stage, self._batch)
        optimizer = still(self._model_file.optimizer(self._parameters))
        layers = [StepTimes() for _ in self._graph.layers]
        whole = StepTimes()
        for _ in range(self._effort.warmup):
            self._marked_step(clock, [StepTimes() for _ in layers])
            optimizer.step()
        started = time.perf_counter()
        done = 0
        while done < self._effort.repeats:
            spent = time.perf_counter() - started
            if done >= self._effort.least_repeats and spent >= self._effort.seconds:
                break
            self._progress("measuring", min(1.0, max(spent / self._effort.seconds, done / self._effort.repeats)))
            # In turn, so that whatever else the machine does slows both alike.
            self._plain_step(clock, whole, optimizer)
            self._marked_step(clock, layers)
            done += 1
        del optimizer
        self._progress("measuring updates", 1.0)
        return Measurement(layers, whole, layer_updates(self._model_file, self._trained_by_layer(), clock), saved)

    def _plain_step(self, clock: Clock[MarkT], times: StepTimes, optimizer: torch.optim.Optimizer) -> None:
        self._drop_gradients()
        clock.wait()
        start = clock.mark()
        loss_function = self._model_file.loss if self._model_file.has_loss else None
        with autocasting(self._batch.device_type, self._graph.autocast):
            output = self._graph.model(*self._batch.args, **self._batch.kwargs)
            loss = loss_of(output, self._batch.target, loss_function)
        after_forward = clock.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        after_backward = clock.mark()
        optimizer.step()
        end = clock.mark()
        clock.wait()
        times.forward_s.append(clock.seconds(start, after_forward))
        times.backward_s.append(clock.seconds(after_forward, after_backward))
        times.update_s.append(clock.seconds(after_backward, end))
        if isinstance(clock, CpuClock):
            times.forward_thread_s.append(clock.thread_seconds(start, after_forward))
            times.backward_thread_s.append(clock.thread_seconds(after_forward, after_backward))

    def _marked_step(self, clock: Clock[MarkT], times: list[StepTimes]) -> None:
        self._drop_gradients()
        clock.wait()
        marks = LayerTimes(clock, len(times))
        self._stage.set_observer(marks)
        marks.start()
        loss = self._stage(self._batch, {})["loss"]
        marks.start_backward()
        loss.backward()
        marks.end()
        clock.wait()
        for layer, forward_s, backward_s in zip(times, *marks.seconds(), strict=True):
            layer.forward_s.append(forward_s)
            layer.backward_s.append(backward_s)
        if isinstance(clock, CpuClock):
            for layer, forward_s, backward_s in zip(times, *marks.seconds(clock.thread_seconds), strict=True):
                layer.forward_thread_s.append(forward_s)
                layer.backward_thread_s.append(backward_s)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _trained_by_layer(self) -> list[dict[str, nn.Parameter]]:
        """Parameters that got a gradient, each in the first layer that uses it."""
        by_name = dict(self._graph.model.named_parameters())
        seen: set[str] = set()
        layers = []
        for layer in self._graph.layers:
            names = [name for name in layer.parameters if name not in seen]
            seen.update(names)
            layers.append({name: by_name[name] for name in names if by_name[name].grad is not None})
        return layers
