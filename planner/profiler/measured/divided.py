"""Measure layers that ranks divide between them, on one device: see `planner.profiler.measured.one_rank`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.formats.profile import DegreeCosts
from planner.model.batch import Batch
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import Variant
from planner.model.stage.stage import StageModule, build_stage
from planner.model.tensor.division import DividedWeights, division_of, keep_parts
from planner.model.tensor.parallel_plan import tensor_parallel_plan
from planner.profiler.measured.device import describe_device
from planner.profiler.measured.make_profile import make_profile
from planner.profiler.measured.one_rank import Collectives, degree_costs, first_rank, reduced
from planner.profiler.measured.step_measurement import StepMeasurement
from planner.profiler.measured.steps import Effort, HasBackward


def measure_degrees(
    spec: TrainingSpec, graph: LayerGraph, batch: Batch, effort: Effort, degrees: Sequence[int]
) -> tuple[DegreeCosts, ...]:
    """Measure the layers as ranks of groups of these sizes compute them, on the device where the model is.

    Raises:
        InputError: if the model does not say how it is divided, or this process has joined others.
        PlanError: where so many ranks cannot divide it.
    """
    device = next(graph.model.parameters()).device
    found = []
    for degree in sorted(set(degrees)):
        plan = tensor_parallel_plan(spec, graph, degree)
        with first_rank(degree, device) as group:
            measurement = _DividedMeasurement(spec, graph, batch, device, division_of(graph, plan, group))
            found.append(measurement.costs(effort, degree))
    return tuple(found)


class _DividedMeasurement(StepMeasurement):
    def __init__(
        self, spec: TrainingSpec, graph: LayerGraph, batch: Batch, device: torch.device, division: DividedWeights
    ) -> None:
        self._division = division
        super().__init__(spec, graph, batch, device)

    def costs(self, effort: Effort, degree: int) -> DegreeCosts:
        """Measure what the layers cost a rank."""
        measured = self.measure_uncompiled(effort)
        counter = Collectives()
        marks = self._counted(counter, counter.mark)
        part = make_profile("", self._graph, self._batch.size, measured, describe_device(self._device, 1, 1))
        layers = self._by_layer(dict(self._stage.named_parameters()))
        return degree_costs(part, degree, layers, reduced(marks, lambda mark: mark))

    def _built(self, names: Sequence[str]) -> StageModule:
        stage = build_stage(self._graph, names, variant=Variant(observable=True, division=self._division))
        keep_parts(stage)
        return stage

    def _plain_forward(self) -> HasBackward:
        return self._forward(None)

    def _flops(self) -> list[tuple[int, int]]:
        return [(0, 0)] * len(self._span)
