"""Training steps of the unsplit model, timed as a whole and layer by layer in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import LOSS
from planner.model.stage.stage import LayerObserver, StageModule, build_stage
from planner.model.stage.unsplit import unsplit_loss
from planner.profiler.measured.accumulation import AddingTime, AddingTimes
from planner.profiler.measured.clock import clock_for
from planner.profiler.measured.compiled import CompiledTimes, as_compiled, measure_compiled, saved_as_compiled
from planner.profiler.measured.saved import saved_bytes
from planner.profiler.measured.steps import Effort, Progress, Steps, StepTimes, repeat, step_failure
from planner.profiler.measured.update import LayerUpdate, layer_updates, still, update_workspaces
from planner.profiler.measured.workspace import workspace_bytes

# Steps that add to gradients of the step before. Few say it, since the adding is seen by itself.
_LEAST_ADDING, _MOST_ADDING = 2, 8


@dataclass(frozen=True)
class Measurement:
    """All that was measured; per-layer lists are in the order of the layers.

    Attributes:
        layers: per layer, over the repeats of the marked steps.
        whole: the user's model without capture or marks, in between; or all layers compiled at once.
        updates: per layer, of the optimizer.
        saved_bytes: per layer.
        workspace_bytes: per layer, uncompiled; None where nothing was run.
        update_workspace_bytes: per layer, of the optimizer; likewise.
        adding: per layer, what adding to gradients takes longer than making them; None where it is not known.
        compiled: where stages are to be compiled, how the above was made.
    """

    layers: list[StepTimes]
    whole: StepTimes
    updates: list[LayerUpdate]
    saved_bytes: list[int]
    workspace_bytes: list[int] | None = None
    update_workspace_bytes: list[int] | None = None
    adding: list[AddingTime] | None = None
    compiled: CompiledTimes | None = None


def measure(
    graph: LayerGraph,
    spec: TrainingSpec,
    batch: Batch,
    device: torch.device,
    effort: Effort,
    progress: Progress,
    *,
    compiled: bool = False,
) -> Measurement:
    """Run and time training steps of `graph` on `batch`; with `compiled`, once more through torch.compile."""
    graph.model.to(device)
    batch = batch.to(device)
    stage = build_stage(graph, [layer.name for layer in graph.layers], observable=True).to(device)
    run = _Run(graph, stage, spec, batch, device)
    try:
        if not compiled:
            return run.measure(effort, progress)
        half = replace(effort, seconds=effort.seconds / 2)
        return run.compiled(run.measure(half, progress), half, progress)
    except RuntimeError as cause:
        raise step_failure(cause) from cause


class _Run:
    def __init__(
        self, graph: LayerGraph, stage: StageModule, spec: TrainingSpec, batch: Batch, device: torch.device
    ) -> None:
        self._graph = graph
        self._stage = stage
        self._spec = spec
        self._batch = batch
        self._device = device
        self._parameters = {name: p for name, p in graph.model.named_parameters() if p.requires_grad}
        self._steps = Steps(clock_for(device), list(self._parameters.values()))
        self._adding = AddingTimes(self._steps.clock, self._by_layer(self._parameters))
        self._room_to_add = True

    def measure(self, effort: Effort, progress: Progress) -> Measurement:
        saved = saved_bytes(self._stage, self._batch)
        layers, whole = self._measure_steps(effort, progress)
        progress("measuring updates", 1.0)
        updates = layer_updates(self._spec, self._trained_by_layer(), self._steps.clock)
        of_updates = update_workspaces(self._spec, self._trained_by_layer(), self._device)
        return Measurement(layers, whole, updates, saved, self._workspaces(saved), of_updates, self._adding.times())

    def _workspaces(self, saved_bytes: list[int]) -> list[int]:
        self._steps.drop_gradients()
        weights = self._by_layer(self._parameters)
        gradients = [sum(parameter.nbytes for parameter in layer.values()) for layer in weights]
        return workspace_bytes(self._stage, self._batch, saved_bytes, gradients)

    def _measure_steps(self, effort: Effort, progress: Progress) -> tuple[list[StepTimes], StepTimes]:
        update = self._optimizer().step
        layers, whole = [StepTimes() for _ in self._graph.layers], StepTimes()
        for _ in range(effort.warmup):
            self._steps.marked(self._marked_forward, [StepTimes() for _ in layers])
            update()
        steps = [
            lambda: self._steps.whole(self._plain_forward, update, whole),
            lambda: self._steps.marked(self._marked_forward, layers),
            lambda: self._add(min(len(whole.forward_s) // 2 + 1, _MOST_ADDING)),
        ]
        repeat(effort, progress, "measuring", steps)
        while self._adding.steps < _LEAST_ADDING and self._room_to_add:
            self._add(_LEAST_ADDING)
        return layers, whole

    def _add(self, most: int) -> None:
        """One more step, which adds to gradients of the step before, unless there were so many already."""
        if self._adding.steps < most and self._room_to_add:
            try:
                self._adding.note(self._unmarked_step)
            except torch.OutOfMemoryError:
                # The largest gradient is there twice, and so it would be in training: nobody will train like this.
                self._room_to_add = False

    def _unmarked_step(self) -> None:
        self._stage.set_observer(None)
        self._stage(self._batch, {})[LOSS].backward()

    def _optimizer(self) -> torch.optim.Optimizer:
        return still(self._spec.optimizer(self._parameters))

    def compiled(self, plain: Measurement, effort: Effort, progress: Progress) -> Measurement:
        update = self._optimizer().step
        times = measure_compiled(
            self._graph, self._batch, plain.layers, plain.whole, self._steps, update, effort, progress
        )
        layers, saved = as_compiled(plain.layers, times), saved_as_compiled(plain.saved_bytes, times)
        return replace(plain, layers=layers, whole=times.whole, saved_bytes=saved, compiled=times)

    def _plain_forward(self) -> Tensor:
        options = ModuleOptions(self._graph.autocast, self._graph.channels_last)
        return unsplit_loss(self._graph.model, self._spec, self._batch, options)

    def _marked_forward(self, observer: LayerObserver) -> Tensor:
        self._stage.set_observer(observer)
        return self._stage(self._batch, {})[LOSS]  # type: ignore[no-any-return]

    def _trained_by_layer(self) -> list[dict[str, nn.Parameter]]:
        """Parameters that got a gradient, by layer."""
        return self._by_layer({name: p for name, p in self._parameters.items() if p.grad is not None})

    def _by_layer(self, parameters: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
        """Each parameter in the first layer that uses it."""
        left = dict(parameters)
        return [{name: left.pop(name) for name in layer.parameters if name in left} for layer in self._graph.layers]
