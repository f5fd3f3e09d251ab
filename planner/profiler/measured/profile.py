"""Model file + device -> Profile."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from statistics import median, quantiles

import torch

from planner.errors import InputError
from planner.formats.profile import Compiled, Device, Edge, Layer, MemoryFormat, Profile, Provenance, Value, WholeStep
from planner.model.autocast import autocast_dtype, autocast_name
from planner.model.capture.graph import GraphLayer, LayerGraph
from planner.model.load import capture_file
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec
from planner.model.stage.compiling import check_compiler
from planner.profiler.defaults import REPEATS, SECONDS
from planner.profiler.measured.accumulation import AddingTime
from planner.profiler.measured.compiled import CompiledTimes
from planner.profiler.measured.contention import at_work, check_processes
from planner.profiler.measured.measure import Measurement, measure
from planner.profiler.measured.steps import Effort, Progress, StepTimes
from planner.version import __version__

LEAST_REPEATS = 3
WARMUP_CPU, WARMUP_CUDA = 2, 10


def profile_model(
    spec: TrainingSpec,
    batch_size: int,
    *,
    device: str = "cpu",
    threads: int = 1,
    seconds: float = SECONDS,
    repeats: int = REPEATS,
    warmup: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    memory_format: MemoryFormat | None = None,
    compiled: bool = False,
    processes: int = 1,
    progress: Progress | None = None,
) -> Profile:
    """Measure what each layer of a model costs in training.

    Times are medians over whole training steps with marks between the layers; in between, the model is run as
    the user wrote it, for `whole_step`. Weights are not trained: the optimizer steps with a learning rate of zero.

    Args:
        spec: the model, its loss and its optimizer.
        batch_size: samples of the (micro)batch to measure with.
        device: "cpu", "cuda" or "cuda:N".
        threads: intra-op threads on a CPU: the cores that one worker will have.
        seconds: time to measure for, warm-up and capture not counted; at least three steps are measured.
        repeats: at most so many steps.
        warmup: steps that do not count; 2 on a CPU, 10 on a GPU.
        seed: of the weights and the example batch.
        dtype: "float32", or "bfloat16" or "float16" to run under torch.autocast, as the plan's stages then will.
        memory_format: "channels-last" to lay out images and weights so, as the plan's stages then will.
        compiled: run through torch.compile, as the plan's stages then will.
        processes: on a CPU, workers that this machine will have; all but the measured one take training steps
            beside it, so that the caches and the memory are as busy as they will be.
        progress: told the phase and how much of it is done, 0 to 1.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: when there is no such device, or a number makes no sense.
    """
    for name, number in (("batch size", batch_size), ("threads", threads), ("repeats", repeats)):
        if number < 1:
            raise InputError(f"{name} {number} is less than 1", hint="give a positive whole number")
    if not 0 <= seconds < float("inf"):
        raise InputError(f"{seconds:g} seconds is no time to measure for", hint="give --seconds 20")
    if threads > (cores := os.cpu_count() or threads):
        raise InputError(f"this machine has {cores} cores, not {threads}", hint="a worker's threads need a core each")
    target = parse_device(device)
    options = ModuleOptions(autocast_dtype(dtype), memory_format == "channels-last", compiled)
    if compiled:
        check_compiler(target.type)
    check_processes(processes, threads, target, spec)
    report = progress or (lambda _phase, _fraction: None)
    if warmup is None:
        warmup = WARMUP_CUDA if target.type == "cuda" else WARMUP_CPU
    with thread_count(threads), torch.random.fork_rng():
        torch.manual_seed(seed)
        report("capturing", 0.0)
        batch = spec.example_batch(batch_size)
        graph = capture_file(spec, batch, options=options)
        effort = Effort(seconds, repeats, min(LEAST_REPEATS, repeats), warmup)
        with at_work(spec, batch_size, processes - 1, threads=threads, options=options):
            measured = measure(graph, spec, batch, target, effort, report, compiled=compiled)
    whole = WholeStep(
        forward_s=median(measured.whole.forward_s),
        backward_s=median(measured.whole.backward_s),
        update_s=median(measured.whole.update_s),
        forward_thread_s=_median(measured.whole.forward_thread_s),
        backward_thread_s=_median(measured.whole.backward_thread_s),
    )
    return make_profile(spec, graph, batch.size, measured, _describe(target, threads, processes), whole)


def make_profile(
    spec: TrainingSpec,
    graph: LayerGraph,
    batch_size: int,
    measured: Measurement,
    device: Device,
    whole: WholeStep | None,
    *,
    dtype: str | None = None,
) -> Profile:
    """The profile of times measured, or estimated where there is no whole step.

    Args:
        spec: the model's.
        graph: its layers.
        batch_size: samples of the microbatch.
        measured: per layer.
        device: that the times belong to.
        whole: the step measured unsplit; None for estimates.
        dtype: None for that of the weights.
    """
    alone_s = sum(update.seconds for update in measured.updates)
    # Stepping layer by layer pays the optimizer's overhead per layer; a stage pays it once.
    share = whole.update_s / alone_s if whole is not None and alone_s else 1.0
    held = _Held(graph, batch_size)
    unknown = [0] * len(graph.layers)
    layers = tuple(
        held.layer(layer, times, adding, update.seconds * share, update.state_bytes, saved, *workspaces)
        for layer, times, adding, update, saved, *workspaces in zip(
            graph.layers,
            measured.layers,
            measured.adding or [AddingTime()] * len(graph.layers),
            measured.updates,
            measured.saved_bytes,
            measured.workspace_bytes or unknown,
            measured.update_workspace_bytes or unknown,
            strict=True,
        )
    )
    return Profile(
        model=spec.name,
        graph_hash=graph.hash,
        autocast=autocast_name(graph.autocast),
        memory_format="channels-last" if graph.channels_last else None,
        compiled=None if measured.compiled is None else _compiled(graph, measured.compiled),
        device=device,
        dtype=dtype or _dtype(graph),
        microbatch_size=batch_size,
        layers=layers,
        edges=tuple(Edge(source=edge.source, value=edge.value, target=edge.target) for edge in graph.edges),
        tied_parameters=tuple(group for group in graph.tied_parameters if group[0] in held.parameters),
        whole_step=whole,
        provenance=Provenance(
            tool=f"planner {__version__}",
            torch=torch.__version__,
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            repeats=len(measured.whole.forward_s) if whole is not None else None,
            source="measured" if whole is not None else "estimated",
        ),
    )


class _Held:
    """Bytes of layers; what is tied counts in the first layer that uses it."""

    def __init__(self, graph: LayerGraph, batch_size: int) -> None:
        self._graph = graph
        self._batch_size = batch_size
        self.parameters = dict(graph.model.named_parameters())
        self._buffers = dict(graph.model.named_buffers())
        self._counted: set[str] = set()

    def layer(
        self,
        layer: GraphLayer,
        times: StepTimes,
        adding: AddingTime,
        update_s: float,
        optimizer_bytes: int,
        saved_bytes: int,
        workspace_bytes: int,
        update_workspace_bytes: int,
    ) -> Layer:
        weights = [self.parameters[name] for name in self._new(layer.parameters)]
        buffers = [self._buffers[name] for name in self._new(layer.buffers)]
        return Layer(
            name=layer.name,
            op=layer.op,
            forward_s=median(times.forward_s),
            backward_s=median(times.backward_s),
            update_s=update_s,
            accumulate_s=adding.seconds,
            accumulate_thread_s=adding.thread_seconds,
            forward_thread_s=_median(times.forward_thread_s),
            backward_thread_s=_median(times.backward_thread_s),
            forward_spread_s=_interquartile_range(times.forward_s),
            backward_spread_s=_interquartile_range(times.backward_s),
            outputs=self._outputs(layer),
            weight_bytes=sum(weight.nbytes for weight in weights),
            gradient_bytes=sum(weight.nbytes for weight in weights if weight.requires_grad),
            optimizer_bytes=optimizer_bytes,
            buffer_bytes=sum(buffer.nbytes for buffer in buffers),
            saved_bytes=saved_bytes,
            workspace_bytes=workspace_bytes,
            update_workspace_bytes=update_workspace_bytes,
            parameters=layer.parameters,
        )

    def _new(self, names: tuple[str, ...]) -> list[str]:
        new = [name for name in names if name not in self._counted]
        self._counted.update(new)
        return new

    def _outputs(self, layer: GraphLayer) -> tuple[Value, ...]:
        specs = [spec for node in layer.nodes if (spec := self._graph.values.get(node.name)) is not None]
        size = self._batch_size
        return tuple(
            Value(
                name=spec.name,
                output_bytes=spec.size_bytes(size),
                gradient_bytes=spec.of_gradient.size_bytes(size) if spec.requires_grad else 0,
            )
            for spec in specs
        )


def _compiled(graph: LayerGraph, times: CompiledTimes) -> Compiled:
    return Compiled(
        runs=tuple(graph.layers[start].name for start in times.starts),
        runs_forward_s=sum(median(run.forward_s) for run in times.runs),
        runs_backward_s=sum(median(run.backward_s) for run in times.runs),
        uncompiled_forward_s=median(times.uncompiled.forward_s),
        uncompiled_backward_s=median(times.uncompiled.backward_s),
    )


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _interquartile_range(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def _dtype(graph: LayerGraph) -> str | None:
    """The dtype that most weights have."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in graph.model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.") if sizes else None


def parse_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        InputError: when there is none.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"'{name}' is not a device", hint="give cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device '{name}' is neither a CPU nor a CUDA GPU", hint="give cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no device '{name}': PyTorch sees {torch.cuda.device_count()} GPUs",
            hint="give --device cpu, or install PyTorch with CUDA on a machine with a GPU",
        )
    return device


def _describe(device: torch.device, threads: int, processes: int) -> Device:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(kind="cuda", name=properties.name, memory_bytes=properties.total_memory)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        kind="cpu",
        name=_cpu_name(),
        threads=threads,
        processes=processes if processes > 1 else None,
        memory_bytes=memory_bytes,
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Use so many intra-op threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
