"""Run one training step of a model on tensors without data, and list its operations by layer."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from planner.errors import InputError, LayerError
from planner.formats.files import replace
from planner.formats.names import EightBits, StackName
from planner.formats.profile import MemoryFormat
from planner.model.batch import Batch, make_batch
from planner.model.capture.abridged import abridged
from planner.model.capture.capture import capture_file
from planner.model.capture.failure import capture_failure, decides_by_values, warn_of_unregistered
from planner.model.capture.fake import fake_batch, fake_modules, make_fake, on_meta
from planner.model.capture.graph import LOSS, LayerGraph
from planner.model.capture.size import Extent
from planner.model.capture.spared_blocks import SparedBlocks, spare_blocks
from planner.model.generators import seeded
from planner.model.modes import warn_of_modes
from planner.model.optimizer_part import trained_parameters
from planner.model.options import ModuleOptions, gradient_bytes
from planner.model.spec import TrainingSpec
from planner.model.stage.parts import OBSERVABLE, LayerObserver
from planner.model.stage.stage import StageModule, build_stage
from planner.model.tensor.division import UNDIVIDED, DividedWeights, division_of, keep_parts
from planner.model.tensor.parallel_plan import tensor_parallel_plan
from planner.model.torch_private import FakeTensorMode
from planner.profiler.estimated.devices import DeviceSpec, DType
from planner.profiler.estimated.execution import (
    EAGER_CPU,
    Execution,
    cuda_operations,
)
from planner.profiler.estimated.experts import (
    ExpertLayer,
    ExpertShare,
    expert_operations,
    shares_of_experts,
    summed_layers,
)
from planner.profiler.estimated.operations import OperationRecorder, RecurrentWorkspace
from planner.profiler.estimated.roofline import Costs
from planner.profiler.estimated.step_as_run import (
    RecordedStep,
    Span,
    StepAsRun,
    as_run,
    mask_of,
)
from planner.profiler.estimated.update import Shapes, UpdateTrace, trace_updates
from planner.profiler.estimated.weight_gradients import of_weights_alone
from planner.profiler.make_profile import LayerMeasurement, Measurement, first_uses, last_uses
from planner.profiler.step.allocation import beyond_held, saved_bytes, tensors_of_batch
from planner.profiler.step.counters import LayerCounts, first_rank, layer_counts
from planner.profiler.step.timing import LayerMarks, StepTimes, drop_gradients
from planner.profiler.this_machine import check_positive

if TYPE_CHECKING:
    from planner.model.tensor.group import TensorGroup

_T = TypeVar("_T")
_FEW = 2  # samples
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepTrace:
    """What a training step does, layer by layer, on no device in particular.

    Of a model's equal blocks few run. Operations are listed by the layers that ran, and all else by
    those of the graph.
    """

    model: str
    dtype: DType  # of products and convolutions
    extent: Extent  # of the batch
    graph: LayerGraph  # with fake weights
    costs: Costs  # of the operations of forward and backward
    until: Sequence[int]  # number of operations before each mark
    layers: LayerMarks[int]  # marks between the operations of those that ran
    stands: Sequence[int]  # for each layer, the one of those that ran whose operations it has
    saved_bytes: list[int]  # from forward to backward, by layer
    # what a layer's forward or backward allocates beyond what the step holds anyway
    workspace_bytes: list[int]
    # of each operation, whether it computes nothing but gradients of weights
    weights_alone: NDArray[np.bool_]
    updates: list[UpdateTrace]
    known_updates: dict[Shapes, UpdateTrace]  # of this trace and of those like it
    # by the first layer that uses them; a rank's parts, where ranks divide them
    weights: list[dict[str, nn.Parameter]]
    counts: LayerCounts
    division: DividedWeights  # of the weights, where ranks divide them
    unfused: Costs | None = None  # where a compiler fuses
    tokens_per_sample: int | None = None  # of a batch of token ids
    with_data: bool = False  # because its sizes depend on values
    products: EightBits | None = None  # of linear layers, where they are in 8 bits
    stack: StackName | None = None  # that ran it
    loss_chunks: int = 1  # parts of the tokens, of which logits exist at a time
    experts: Sequence[ExpertShare] = ()  # of each layer
    spared: SparedBlocks | None = None  # of the model, which the graph does not have

    def layer_seconds(self, spec: DeviceSpec) -> tuple[list[float], list[float], list[float]]:
        """Return the forward, backward and update seconds of each layer on such a device."""
        forward, backward = self._by_layer(self.costs.seconds(spec))
        updates = [update.seconds(spec) for update in self.updates]
        if spec.dispatch_s:
            forward_host, backward_host = self._by_layer(self.costs.host_seconds(spec))
            forward = _at_hosts_pace(forward, forward_host)
            backward = _at_hosts_pace(backward, backward_host)
            updates_host = [update.host_launches * spec.dispatch_s for update in self.updates]
            updates = _at_hosts_pace(updates, updates_host)

        return forward, backward, updates

    def weight_shares(self, spec: DeviceSpec) -> list[float | None]:
        """Return the part of each layer's backward that computes gradients of weights; None where
        the backward takes no time.
        """
        seconds = self.costs.seconds(spec)
        _, whole = self._by_layer(seconds)
        _, alone = self._by_layer(np.where(self.weights_alone, seconds, 0.0))
        return [
            min(1.0, part_s / all_s) if all_s > 0 else None
            for part_s, all_s in zip(alone, whole, strict=True)
        ]

    def _by_layer(self, seconds: NDArray[np.float64]) -> tuple[list[float], list[float]]:
        """Sum the operations of each layer's forward and backward."""
        sums = np.concatenate([[0.0], np.cumsum(seconds)])[list(self.until)]
        forward, backward = self.layers.sums(lambda start, end: float(sums[end] - sums[start]))
        return _for_all(forward, self.stands), _for_all(backward, self.stands)

    def estimate(self, spec: DeviceSpec) -> Measurement:
        """Return what the layers cost on such a device."""
        forward, backward, update = self.layer_seconds(spec)
        times = [
            StepTimes([forward_s], [backward_s])
            for forward_s, backward_s in zip(forward, backward, strict=True)
        ]
        alone = {id(each): each.estimate(spec) for each in self.updates}
        updates = [
            replace(alone[id(each)], update_s=s)
            for each, s in zip(self.updates, update, strict=True)
        ]
        columns = zip(
            times,
            updates,
            self.saved_bytes,
            self.workspace_bytes,
            self.counts.flops,
            self.weight_shares(spec),
            strict=True,
        )
        return Measurement([LayerMeasurement(*column) for column in columns])


def _for_all(ran: Sequence[_T], stands: Sequence[int]) -> list[_T]:
    """Return what holds for each layer, given what holds for those that ran."""
    return [ran[place] for place in stands]


def _at_hosts_pace(device: list[float], host: list[float]) -> list[float]:
    """Return the layers' seconds, which add up to the device's or the host's, whichever takes
    longer.

    The host runs ahead while the device is busy, so only the sums compete. A layer that the host
    launches more slowly than the device computes it gets its share of the difference.
    """
    slower = [max(pair) for pair in zip(device, host, strict=True)]
    total = sum(slower)
    factor = max(sum(device), sum(host)) / total if total else 1.0
    return [seconds * factor for seconds in slower]


@contextmanager
def collecting(every: int) -> Iterator[None]:
    """Let the garbage collector look after so many allocations; 0 for never.

    It goes through the millions of objects of the tracer, which stay: a fifth of the time of a
    trace, and a tenth of that of a search after it.
    """
    before = gc.get_threshold()
    gc.set_threshold(every)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@collecting(0)
def trace_step(
    training_spec: TrainingSpec,
    batch_size: int,
    dtype: DType = "float32",
    memory_format: MemoryFormat | None = None,
    execution: Execution = EAGER_CPU,
    degree: int = 1,
    like: StepTrace | None = None,
    lengths: Mapping[str, int] | None = None,
    *,
    spares_blocks: bool = False,
) -> StepTrace:
    """Run one step of the model without data: nothing is computed, and weights and activations need
    no memory.

    A model whose file names blocks is built in memory, because blocks run to show what they
    exchange. Where a model or a block decides by values, as experts that choose their tokens do,
    the step runs with the weights and the data of the model file, on the CPU: its sizes are those
    that they happen to give.

    Args:
        training_spec: whose model can be built on the meta device; others are built in memory once.
        dtype: "bfloat16" and "float16" run the forward under autocast.
        execution: how the device runs it; autocast on its kind says in which dtypes values cross
            between stages.
        degree: ranks that divide the layers; the step is that of the first one.
        like: a trace of the same model in the same dtype and execution, whose graph serves again
            where it holds for this size, and its updates.
        lengths: of the batch, where they vary; None for the greatest.
        spares_blocks: whether equal blocks of a large mixture are left out of the graph.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: when the batch makes no sense, the optimizer looks at numbers, or no layer is
            divided.
        PlanError: where so many ranks cannot divide them.
    """
    check_positive("batch_size", batch_size)
    half = _HALF.get(dtype)
    if execution.master_weights and half is None:
        raise InputError(
            "master weights in float32 belong to weights in half precision",
            hint="give `dtype` float16 or bfloat16",
        )

    if execution.eight_bits is not None and not execution.master_weights:
        raise InputError(
            f"products in {execution.eight_bits.precision} are estimated with weights in half "
            f"precision and masters in float32",
            hint="give `master_weights` and `dtype=bfloat16`, or leave out `precision`",
        )

    autocast, halved = (None, half) if execution.master_weights else (half, None)
    layout = memory_format == "channels-last"
    options = ModuleOptions(
        autocast, layout, device=execution.kind, half=halved, sums_in_half=execution.sums_in_half
    )
    one_rank = first_rank(degree, torch.device("cpu")) if degree > 1 else nullcontext()
    with seeded(0), one_rank as group:
        known = {} if like is None else like.known_updates
        return _Tracer(
            training_spec,
            batch_size,
            dtype,
            execution,
            options,
            group,
            known,
            lengths,
            spares_blocks,
        ).trace(like)


def _fake_blocks(graph: LayerGraph, mode: FakeTensorMode) -> LayerGraph:
    chain = graph.blocks
    assert chain is not None
    # The blocks together with the model, because they may be modules of their own around the
    # model's.
    model, *blocks = fake_modules(
        (graph.model, *(block for layer in chain.layers for _, block in layer.blocks)), mode
    )
    rest = iter(blocks)
    layers = tuple(
        replace(layer, blocks=tuple((name, next(rest)) for name, _ in layer.blocks))
        for layer in chain.layers
    )
    return replace(graph, model=model, blocks=replace(chain, layers=layers))


def _experts(
    recorder: OperationRecorder,
    marks: LayerMarks[int],
    weights: Sequence[Mapping[str, nn.Parameter]],
) -> list[ExpertShare]:
    """Return what experts have of each layer: of its weights those that have one part for each."""
    own: list[list[ExpertLayer]] = [[] for _ in weights]
    spans = [
        (layer, recorder.until[start], recorder.until[end])
        for layer, in_backward, start, end in marks.spans()
        if not in_backward
    ]
    backward = recorder.until[marks.backward_start]
    for number, found in expert_operations(recorder.operations, backward):
        layer = next(layer for layer, start, end in spans if start <= number < end)
        own[layer].append(found)

    layers = [summed_layers(each) for each in own]
    experts = max((each.experts for each in layers), default=0)
    shares = shares_of_experts(weights, experts)
    return [ExpertShare(*each) for each in zip(layers, shares, strict=True)]


def _recorded(
    recorder: OperationRecorder,
    marks: LayerMarks[int],
    saved: Sequence[int],
    workspaces: Sequence[int],
) -> RecordedStep:
    until = recorder.until
    spans = [
        Span(layer, in_backward, until[start], until[end])
        for layer, in_backward, start, end in marks.spans()
    ]
    return RecordedStep(
        recorder.operations, until, until[marks.backward_start], spans, saved, workspaces
    )


def _weights_alone(step: StepAsRun, marks: LayerMarks[int]) -> NDArray[np.bool_]:
    """Return of each operation whether it computes nothing but gradients of weights."""
    layer_of = [-1] * len(step.operations)
    for layer, _, start, end in marks.spans():
        first, last = step.until[start], step.until[end]
        layer_of[first:last] = [layer] * (last - first)
    return of_weights_alone(step.operations, step.until[marks.backward_start], layer_of)


@dataclass(frozen=True)
class _Tracer:
    """Records a step, on tensors with data or without."""

    training_spec: TrainingSpec
    batch_size: int
    dtype: DType
    execution: Execution
    options: ModuleOptions
    group: "TensorGroup | None"  # of the rank whose step it is
    known_updates: dict[Shapes, UpdateTrace]
    lengths: Mapping[str, int] | None = None
    spares_blocks: bool = False

    def trace(self, like: StepTrace | None) -> StepTrace:
        """Run a step without data, or with data where sizes depend on it."""
        spec, has_blocks = self.training_spec, self.training_spec.defines("blocks")
        known = None if like is None or like.with_data or has_blocks else like.graph
        spared = None if like is None else like.spared
        if known is not None and known.batch_size in (None, self.batch_size):
            graph, model = known, known.model
        else:
            model = spec.build_model() if has_blocks else on_meta(spec.build_model)
            warn_of_unregistered(model)
            warn_of_modes(model)
            if self.spares_blocks and not has_blocks:
                spared = spare_blocks(model)
            if not has_blocks:
                self.options.prepare(model)
                (model,) = fake_modules(
                    [model], FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
                )
            graph = self._captured(model)

        # The device's own operations; with data, those of the CPU that computes.
        operations = cuda_operations() if self.execution.kind == "cuda" else nullcontext()
        try:
            # Tensors of two modes do not mix, so the weights must be fake ones of the run's mode,
            # as the batch is.
            if has_blocks:
                with FakeTensorMode(allow_non_fake_inputs=True) as mode, operations:
                    fake = _fake_blocks(graph, mode)
                    stage = self._whole(fake)
                    return self._run(
                        fake, stage, fake_batch(self._batch(stage)), range(len(fake.layers))
                    )
            with abridged(graph) as (shorter, stands):
                stage = self._whole(shorter)
                batch = self._batch(stage)
                with FakeTensorMode(), operations:
                    make_fake(stage)
                    trace = self._run(shorter, stage, fake_batch(batch), stands)
            return replace(trace, graph=graph, spared=spared)
        except (LayerError, RuntimeError) as cause:
            if not decides_by_values(cause):
                raise cause if has_blocks else capture_failure(cause, model) from cause

        if not has_blocks:
            graph = self._captured(spec.build_model())
        stage = self._whole(graph)
        batch = make_batch(
            spec.example_batch(stage.division.samples_of(self.batch_size), self.lengths),
            "example_batch",
        )
        trace = self._run(graph, stage, batch, range(len(graph.layers)))
        return replace(trace, with_data=True)

    def _batch(self, stage: StageModule) -> Batch:
        """Return a batch without data, of the samples that the rank has."""
        size = stage.division.samples_of(self.batch_size)
        return on_meta(lambda: self.training_spec.example_batch(size, self.lengths))

    def _captured(self, model: nn.Module) -> LayerGraph:
        """Capture with few samples, as example batches have data; with all where the graph is good
        for one size.
        """
        spec = self.training_spec
        capture = partial(capture_file, spec, model=model, options=self.options)
        graph = capture(spec.example_batch(min(self.batch_size, _FEW)))
        if graph.batch_size is None:
            return graph
        return capture(spec.example_batch(self.batch_size))

    def _whole(self, graph: LayerGraph) -> StageModule:
        """Build a stage of all layers."""
        division = UNDIVIDED
        if self.group is not None:
            plan = tensor_parallel_plan(
                self.training_spec, graph, self.group.degree, self.batch_size
            )
            division = division_of(graph, plan, self.group, self.batch_size)

        variant = replace(OBSERVABLE, division=division)
        stage = build_stage(graph, [layer.name for layer in graph.layers], variant=variant)
        keep_parts(stage)
        return stage

    def _run(
        self, graph: LayerGraph, stage: StageModule, batch: Batch, stands: Sequence[int]
    ) -> StepTrace:
        """Run forward, backward and updates of `stage`, with all layers of `graph`; `stands` is
        that of the trace.
        """

        def run(observer: LayerObserver) -> dict[str, Tensor]:
            stage.set_observer(observer)
            results: dict[str, Tensor] = stage(batch, {})
            return results

        with RecurrentWorkspace():  # type: ignore[no-untyped-call]
            first = dict[str, Tensor]()
            saved = saved_bytes(
                [stage], lambda observer: first.update(run(observer)), len(graph.layers)
            )
            if self.group is not None:
                # DTensor runs an operation that it has not met yet on tensors without data first,
                # which would count.
                first[LOSS].backward()  # type: ignore[no-untyped-call]
                drop_gradients(stage.parameters())
            first.clear()

        recorder = OperationRecorder(
            "tf32" if self.dtype == "tf32" else "float32",
            gpu=self.execution.kind == "cuda",
            grouped=self.dtype if self.options.autocast is not None else None,
        )
        marks = LayerMarks(recorder.end_span, len(graph.layers))
        with recorder:
            marks.run(lambda observer: run(observer)[LOSS])
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        names = first_uses(layer.parameters for layer in graph.layers)
        weights = [{name: parameters[name] for name in own} for own in names]
        trained = [
            {name: each for name, each in own.items() if each.grad is not None} for own in weights
        ]
        made = last_uses([layer.parameters for layer in graph.layers])
        gradients = [
            sum(gradient_bytes(parameters[n]) for n in own if parameters[n].grad is not None)
            for own in made
        ]
        # The batch was there before, but in training it comes with the step.
        batch_bytes = sum(tensor.nbytes for tensor in tensors_of_batch(batch))
        peaks = recorder.allocated.peaks
        workspaces = beyond_held(marks, peaks, saved, gradients, (batch_bytes, batch_bytes))
        counts = layer_counts(marks, recorder.totals_until.__getitem__)
        whole = trained_parameters(graph.model)
        updates = trace_updates(
            trained, self.training_spec, self.execution, self.known_updates, whole
        )
        step = as_run(
            _recorded(recorder, marks, saved, workspaces), self.execution, mask_of(graph.model)
        )
        return StepTrace(
            model=self.training_spec.name,
            dtype=self.dtype,
            extent=stage.extent(batch),
            graph=graph,
            costs=Costs(step.operations),
            until=step.until,
            layers=marks,
            stands=stands,
            saved_bytes=_for_all(step.saved_bytes, stands),
            workspace_bytes=_for_all(step.workspace_bytes, stands),
            weights_alone=_weights_alone(step, marks),
            updates=_for_all(updates, stands),
            known_updates=self.known_updates,
            weights=_for_all(weights, stands),
            division=stage.division,
            counts=LayerCounts(
                flops=_for_all(counts.flops, stands),
                reduced={
                    name: tuple(_for_all(column, stands)) for name, column in counts.reduced.items()
                },
            ),
            unfused=Costs(step.unfused) if self.execution.is_compiled_alone else None,
            tokens_per_sample=batch.tokens_per_sample,
            products=self.execution.products,
            stack=self.execution.stack,
            loss_chunks=self.execution.loss_chunks,
            experts=_for_all(_experts(recorder, marks, weights), stands),
        )
