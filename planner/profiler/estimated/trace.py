"""One training step of a model on tensors without data, as a list of operations by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from planner.errors import InputError, ModelFileError
from planner.formats.profile import MemoryFormat
from planner.model.batch import Batch
from planner.model.capture.failure import capture_failure
from planner.model.capture.graph import LayerGraph
from planner.model.load import capture_file
from planner.model.memory_format import lay_out
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec
from planner.model.stage.stage import StageModule, build_stage
from planner.profiler.estimated.devices import DeviceSpec, DType
from planner.profiler.estimated.operations import Costs, Operation, Recorder, recurrent_workspace
from planner.profiler.measured.accumulation import AddingTime
from planner.profiler.measured.clock import LayerTimes
from planner.profiler.measured.saved import saved_bytes
from planner.profiler.measured.steps import step_failure
from planner.profiler.measured.update import LayerUpdate, state_bytes_of, still

T = TypeVar("T")
_FEW = 2  # samples
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepTrace:
    """What a training step does, layer by layer, on no device in particular.

    Attributes:
        graph: the captured model, its weights pretended.
        batch_size: samples.
        saved_bytes: kept from forward to backward, by layer.
    """

    graph: LayerGraph
    batch_size: int
    saved_bytes: list[int]
    _clock: _OperationClock
    _marks: LayerTimes[int]
    _updates: list[_UpdateTrace]

    def layer_seconds(self, spec: DeviceSpec) -> tuple[list[float], list[float], list[float]]:
        """Forward, backward and update seconds of each layer on such a device."""
        self._clock.estimate(spec)
        forward, backward = self._marks.seconds()
        return forward, backward, [update.seconds(spec) for update in self._updates]

    def adding(self, spec: DeviceSpec) -> list[AddingTime]:
        """Adding to gradients, by layer: both are read and their sum is written."""
        return [AddingTime(update.adding_s(spec)) for update in self._updates]

    def updates(self, spec: DeviceSpec) -> list[LayerUpdate]:
        """The optimizer's step, by layer."""
        return [LayerUpdate(update.seconds(spec), update.state_bytes) for update in self._updates]

    @property
    def costs(self) -> Costs:
        """All operations of forward and backward."""
        return self._clock.costs


def trace_step(
    training_spec: TrainingSpec, batch_size: int, dtype: DType = "float32", memory_format: MemoryFormat | None = None
) -> StepTrace:
    """Run one step of the model without data: nothing is computed, and no memory is needed for weights or activations.

    A model whose file names blocks is built in memory, because blocks are run to see what they exchange; where they
    decide by values, the step is run with them, on the CPU.

    Args:
        training_spec: whose model can be built on the meta device; others are built in memory once.
        batch_size: samples of the (micro)batch.
        dtype: "bfloat16" and "float16" run the forward under autocast.
        memory_format: of weights and images.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: when the batch makes no sense, or the optimizer looks at numbers.
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} is less than 1", hint="give a positive whole number")
    options = ModuleOptions(_HALF.get(dtype), memory_format == "channels-last")
    tracer = _Tracer(training_spec, batch_size, Recorder("tf32" if dtype == "tf32" else "float32"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if training_spec.defines("blocks"):
            return _trace_blocks(tracer, options)
        model = _on_meta(training_spec.build_model)
        if options.channels_last:
            lay_out(model)
        batch = _on_meta(lambda: training_spec.example_batch(batch_size))
        (model,) = _without_data([model], FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
        graph = _capture(training_spec, model, batch_size, options)
        try:
            # On a pretended CPU: PyTorch chooses kernels by device, and has none of its own for the meta device.
            stage = _whole(graph)
            with FakeTensorMode():
                _pretend(stage)
                return tracer.trace(graph, stage, _pretended(batch))
        except (NotImplementedError, RuntimeError) as cause:  # operations that cannot tell the shape of their result
            raise capture_failure(cause, model) from cause


def _capture(training_spec: TrainingSpec, model: nn.Module, batch_size: int, options: ModuleOptions) -> LayerGraph:
    """With few samples, because example batches have data; with all of them where the model knows no other number."""
    graph = capture_file(training_spec, training_spec.example_batch(min(batch_size, _FEW)), model, options=options)
    if graph.batch_size is None:
        return graph
    return capture_file(training_spec, training_spec.example_batch(batch_size), model, options=options)


def _trace_blocks(tracer: _Tracer, options: ModuleOptions) -> StepTrace:
    training_spec, batch_size = tracer.training_spec, tracer.batch_size
    graph = _capture(training_spec, training_spec.build_model(), batch_size, options)
    batch = _on_meta(lambda: training_spec.example_batch(batch_size))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            pretended = _blocks_without_data(graph, mode)
            return tracer.trace(pretended, _whole(pretended), _pretended(batch))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return tracer.trace(graph, _whole(graph), training_spec.example_batch(batch_size))


def _blocks_without_data(graph: LayerGraph, mode: FakeTensorMode) -> LayerGraph:
    chain = graph.blocks
    assert chain is not None
    # The blocks with the model: they may be modules of their own around the model's.
    model, *blocks = _without_data((graph.model, *(block for layer in chain.layers for _, block in layer.blocks)), mode)
    rest = iter(blocks)
    layers = tuple(
        replace(layer, blocks=tuple((name, next(rest)) for name, _ in layer.blocks)) for layer in chain.layers
    )
    return replace(graph, model=model, blocks=replace(chain, layers=layers))


def _whole(graph: LayerGraph) -> StageModule:
    return build_stage(graph, [layer.name for layer in graph.layers], observable=True)


@dataclass
class _Tracer:
    """Records a step, on tensors with data or without."""

    training_spec: TrainingSpec
    batch_size: int
    recorder: Recorder

    def trace(self, graph: LayerGraph, stage: StageModule, batch: Batch) -> StepTrace:
        """Forward, backward and updates of the `stage` of all layers of `graph`."""
        self.recorder.operations.clear()
        clock = _OperationClock(self.recorder)
        with recurrent_workspace():
            saved = saved_bytes(stage, batch)
        marks = LayerTimes(clock, len(graph.layers))
        stage.set_observer(marks)
        with self.recorder:
            marks.start()
            loss = stage(batch, {})["loss"]
            marks.start_backward()
            try:
                loss.backward()
            except RuntimeError as cause:
                raise step_failure(cause) from cause
            marks.end()
        trained = {name for name, parameter in stage.named_parameters() if parameter.grad is not None}
        updates = _trace_updates(graph, self.training_spec, trained)
        clock.costs = Costs(self.recorder.operations)
        return StepTrace(graph, self.batch_size, saved, clock, marks, updates)


class _OperationClock:
    """A point in time is a number of operations; estimated times are told afterwards, for as many devices as wanted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._until: NDArray[np.float64] = np.zeros(1)
        self.costs = Costs([])

    def estimate(self, spec: DeviceSpec) -> None:
        """From now on, times are those on such a device."""
        self._until = np.concatenate([[0.0], np.cumsum(self.costs.seconds(spec))])

    def mark(self) -> int:
        return len(self._recorder.operations)

    def wait(self) -> None:
        return

    def seconds(self, start: int, end: int) -> float:
        return float(self._until[end] - self._until[start])


@dataclass(frozen=True)
class _UpdateTrace:
    """The optimizer's step on one layer's parameters, and the sums of their gradients over microbatches."""

    costs: Costs
    state_bytes: int
    adding: Costs

    def adding_s(self, spec: DeviceSpec) -> float:
        return float(self.adding.seconds(spec).sum())

    def seconds(self, spec: DeviceSpec) -> float:
        # On GPUs torch's optimizers run each of their operations once for all parameters (foreach).
        launches = replace(spec, launch_s=0.0) if spec.kind == "cuda" else spec
        return float(self.costs.seconds(launches).sum())


def _trace_updates(graph: LayerGraph, training_spec: TrainingSpec, trained: set[str]) -> list[_UpdateTrace]:
    by_name = dict(graph.model.named_parameters())
    seen: set[str] = set()
    traces = []
    for layer in graph.layers:
        names = [name for name in layer.parameters if name in trained and name not in seen]
        seen.update(names)
        parameters = [_on_meta_device(by_name[name]) for name in names]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        traces.append(_trace_update(training_spec, parameters))
    return traces


def _on_meta_device(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))


def _trace_update(training_spec: TrainingSpec, parameters: list[nn.Parameter]) -> _UpdateTrace:
    if not parameters:
        return _UpdateTrace(Costs([]), 0, Costs([]))
    try:
        with torch.device("meta"):
            optimizer = still(training_spec.optimizer(list(parameters)))
        optimizer.step()  # makes the state
        with Recorder(op_class="update") as recorder:
            optimizer.step()
    except (NotImplementedError, RuntimeError) as cause:
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise InputError(
            f"the step of the optimizer in '{training_spec.origin}' cannot be estimated, it looks at numbers: {reason}",
            hint="leave --estimate out to measure it, or estimate with another optimizer",
        ) from cause
    # Counters of steps are on no device; their arithmetic takes no time worth counting.
    large = [operation for operation in recorder.operations if operation.bytes >= min(p.nbytes for p in parameters)]
    adding = [Operation("update", 0.0, 3.0 * parameter.nbytes, "float32") for parameter in parameters]
    return _UpdateTrace(Costs(large), state_bytes_of(optimizer), Costs(adding))


def _on_meta(build: Callable[[], T]) -> T:
    """What `build` returns, without memory for its tensors, unless it looks at their numbers."""
    try:
        with torch.device("meta"):
            return build()
    except ModelFileError:
        return build()  # a mistake in the file raises again


def _without_data(modules: Sequence[nn.Module], mode: FakeTensorMode) -> tuple[nn.Module, ...]:
    """The same modules on a pretended CPU, what they share still shared."""
    # Tensors of their own on the meta device would do as well, but for operations that are other ones there.
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with mode:
        memo: dict[int, Any] = {id(tensor): _pretended_weight(tensor) for tensor in tensors}
    return copy.deepcopy(tuple(modules), memo)


def _pretend(stage: StageModule) -> None:
    """Put pretended weights into the stage, of the mode that is on."""
    pretended: dict[int, Tensor] = {}
    for module in stage.modules():
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None:
                    registry[name] = pretended.setdefault(id(tensor), _pretended_weight(tensor))


def _pretended_weight(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _pretended(batch: Batch) -> Batch:
    return Batch(*tree_map(_pretended_input, (batch.args, batch.kwargs, batch.target)))


def _pretended_input(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
