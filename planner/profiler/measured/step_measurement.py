"""Time training steps of the unsplit model, or of a rank's part of it, as a whole and layer by
layer in turn.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.errors import LayerError
from planner.formats.files import replace
from planner.formats.profile import DegreeCosts
from planner.model.batch import Batch
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.loss import unsplit_loss
from planner.model.optimizer_part import trained_parameters
from planner.model.options import gradient_bytes
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import LayerObserver, Variant
from planner.model.stage.stage import build_stage
from planner.model.tensor.division import UNDIVIDED, DividedWeights, division_of, keep_parts
from planner.model.tensor.parallel_plan import tensor_parallel_plan
from planner.profiler.make_profile import (
    LayerMeasurement,
    Measurement,
    first_uses,
    last_uses,
    make_profile,
)
from planner.profiler.measured.compiled import measure_compiled
from planner.profiler.step.allocation import saved_bytes, tensors_of_batch, workspace_bytes
from planner.profiler.step.counters import (
    Counter,
    LayerCounts,
    degree_costs,
    first_rank,
    layer_counts,
)
from planner.profiler.step.timing import (
    Clock,
    Effort,
    HasBackward,
    LayerMarks,
    Steps,
    StepTimes,
    drop_gradients,
    repeat,
    step_failure,
)
from planner.profiler.step.update import Update, layer_updates
from planner.profiler.this_machine import describe_device, free_memory_bytes

_SECOND = 0.2  # share of the time that a second measurement has
# it counts where its steps take this much of the first's: what disturbs only makes them longer
_FASTER = 0.97


class StepMeasurement:
    """Measures training steps of the layers of `span` on one batch; None is all, and moves the
    model to the device.
    """

    counts: LayerCounts  # once measured

    def __init__(
        self,
        spec: TrainingSpec,
        graph: LayerGraph,
        batch: Batch,
        device: torch.device,
        span: range | None = None,
        division: DividedWeights = UNDIVIDED,
    ) -> None:
        # Whether a whole step is one of the model as the user wrote it.
        self._unsplit = span is None and division is UNDIVIDED
        if span is None:
            graph.model.to(device)
            span = range(len(graph.layers))

        self._span = span
        self._spec = spec
        self._graph = graph
        self._device = device
        self._batch = batch.to(device)
        names = [graph.layers[index].name for index in span]
        stage = build_stage(graph, names, variant=Variant(observable=True, division=division))
        keep_parts(stage)
        self._stage = stage.to(device)
        self._parameters = {
            name: p for name, p in self._stage.named_parameters() if p.requires_grad
        }
        self._whole = trained_parameters(graph.model)
        self._clock = Clock(device)

    def measure(self, effort: Effort, *, compiled: bool = False) -> Measurement:
        """Measure the model uncompiled; with `compile`, spend half of the time on it through
        torch.compile.

        Raise ModelFileError when a step fails, and torch.OutOfMemoryError when the device has no
        room for it.
        """
        try:
            if not compiled:
                return self._measure_twice(effort)
            half = replace(effort, seconds=effort.seconds / 2)
            plain = self.measure_uncompiled(half)
            return measure_compiled(self._graph, self._batch, plain, self._steps(), half)
        except torch.OutOfMemoryError:
            raise  # the caller may measure part by part
        except RuntimeError as cause:
            raise step_failure(cause) from cause

    def _measure_twice(self, effort: Effort) -> Measurement:
        """Measure, and measure the steps once more and shorter: what other processes do comes and
        goes.
        """
        first = self.measure_uncompiled(replace(effort, seconds=(1 - _SECOND) * effort.seconds))
        assert first.whole is not None
        shorter = replace(
            effort, seconds=_SECOND * effort.seconds, least_repeats=min(2, effort.repeats), warmup=1
        )
        layers, whole = self._measure_steps(shorter, "measuring again")
        passes = first.whole, whole
        if whole.median_s() > _FASTER * first.whole.median_s():
            return replace(first, passes=passes)
        quieter = [
            replace(layer, times=times) for layer, times in zip(first.layers, layers, strict=True)
        ]
        return replace(first, layers=quieter, whole=whole, passes=passes)

    def measure_uncompiled(self, effort: Effort) -> Measurement:
        """Measure the model as it is captured; raise RuntimeError when a step fails."""
        try:
            saved = self._saved()
        # in training it says what to plan; here parts may be measured
        except LayerError as failure:
            raise (
                failure.__cause__
                if isinstance(failure.__cause__, torch.OutOfMemoryError)
                else failure
            ) from None

        self.counts = self._counted()
        layers, whole = self._measure_steps(effort)
        effort.progress("measuring updates", 1.0)
        # The last step has left gradients, which updates need.
        trained = self._by_layer(
            {name: p for name, p in self._parameters.items() if p.grad is not None}
        )
        updates = layer_updates(self._spec, trained, self._clock, self._device, self._whole)
        drop_gradients(self._parameters.values())
        made = last_uses(
            [layer.parameters for layer in self._graph.layers[self._span.start : self._span.stop]]
        )
        known = self._parameters
        gradients = [
            sum(gradient_bytes(known[name]) for name in own if name in known) for own in made
        ]
        # Last, because what libraries allocate once in the first steps would count.
        workspaces = self._workspaces(saved, gradients)
        columns = zip(layers, updates, saved, workspaces, self.counts.flops, strict=True)
        return Measurement([LayerMeasurement(*column) for column in columns], whole)

    def degree_costs(self, effort: Effort) -> DegreeCosts:
        """Measure what the layers cost one of the ranks that divide them."""
        measured = self.measure_uncompiled(effort)
        part = make_profile(
            "",
            self._graph,
            self._stage.extent(self._batch),
            measured,
            describe_device(self._device, 1, 1),
        )
        weights = self._by_layer(dict(self._stage.named_parameters()))
        return degree_costs(part, self._stage.division, weights, self.counts)

    def _measure_steps(
        self, effort: Effort, phase: str = "measuring"
    ) -> tuple[list[StepTimes], StepTimes]:
        steps = self._steps()
        layers = [StepTimes() for _ in self._span]
        whole = StepTimes()
        for _ in range(effort.warmup):
            steps.marked(self._forward, [StepTimes() for _ in layers])
            steps.update()

        # Marks slow a step down a little, so the whole step is measured without them.
        in_turn = [
            lambda: steps.whole(self._plain_forward, whole),
            lambda: steps.marked(self._forward, layers),
        ]
        repeat(effort, phase, in_turn)
        return layers, whole

    def _steps(self) -> Steps:
        # Made anew for each measurement and dropped after it, because the optimizer's state takes
        # memory.
        if not self._parameters:
            return Steps(self._clock, [], lambda: None)
        return Steps(
            self._clock,
            self._parameters.values(),
            Update(self._spec, self._parameters, self._whole),
        )

    def _saved(self) -> list[int]:
        if self._device.type == "cpu":
            most_bytes = free_memory_bytes()
        else:
            most_bytes = math.inf
        return saved_bytes([self._stage], self._run, len(self._span), most_bytes=most_bytes)

    def _counted(self) -> LayerCounts:
        """Count what layers compute and exchange, in a step of their own: counting takes time."""
        counter = Counter()
        marks = LayerMarks(counter.mark, len(self._span))
        with counter:
            marks.run(self._forward)
        drop_gradients(self._parameters.values())
        return layer_counts(marks, lambda total: total)

    def _workspaces(self, saved: Sequence[int], gradients: Sequence[int]) -> list[int]:
        # The batch was there before this step, but in training it comes with the step.
        batch_bytes = sum(tensor.nbytes for tensor in tensors_of_batch(self._batch))
        found = workspace_bytes(
            self._forward, self._device, saved, gradients, (batch_bytes, batch_bytes)
        )
        drop_gradients(self._parameters.values())
        return found

    def _plain_forward(self) -> HasBackward:
        if not self._unsplit:
            return self._forward(None)
        return unsplit_loss(self._graph.model, self._spec, self._batch, self._graph.options)

    def _forward(self, observer: LayerObserver | None) -> HasBackward:
        return self._run(observer)[LOSS]

    def _run(self, observer: LayerObserver | None) -> Mapping[str, Tensor]:
        self._stage.set_observer(observer)
        results: dict[str, Tensor] = self._stage(self._batch, {})
        return results

    def _by_layer(self, parameters: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
        """Return each parameter in the first layer that uses it."""
        names = first_uses(layer.parameters for layer in self._graph.layers)[
            self._span.start : self._span.stop
        ]
        return [{name: parameters[name] for name in layer if name in parameters} for layer in names]


def measure_degrees(
    spec: TrainingSpec, graph: LayerGraph, batch: Batch, effort: Effort, degrees: Sequence[int]
) -> tuple[DegreeCosts, ...]:
    """Measure the layers as ranks of groups of these sizes compute them, on the device where the
    model is.
    """
    return tuple(_measure_degree(spec, graph, batch, effort, degree) for degree in degrees)


def _measure_degree(
    spec: TrainingSpec, graph: LayerGraph, batch: Batch, effort: Effort, degree: int
) -> DegreeCosts:
    """Measure the first rank of a group, also with sequence parallelism where that divides
    anything.
    """
    device = next(graph.model.parameters()).device
    plan = tensor_parallel_plan(spec, graph, degree, batch.size)
    with first_rank(degree, device) as group:
        division = division_of(graph, plan, group, batch.size)
        own = batch
        if division.by_samples:
            own = batch.split(degree)[0]

        whole = StepMeasurement(spec, graph, own, device, division=division)
        costs = whole.degree_costs(effort)

        by_tokens = replace(division, by_tokens=True)
        if not by_tokens.within(graph, ()).tokens:
            return costs
        divided = StepMeasurement(spec, graph, own, device, division=by_tokens)
        return replace(costs, by_tokens=divided.degree_costs(effort))
