"""Estimate the profile of a model file for a device that need not be there, of the table or
described in a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from planner.errors import InputError, LayerError, PlanError
from planner.formats.device_kinds import profile_of_kinds
from planner.formats.files import Record, load_record, replace
from planner.formats.names import EightBits
from planner.formats.profile import (
    TF32,
    Compiled,
    DegreeCosts,
    Device,
    MemoryFormat,
    Profile,
)
from planner.model.elementwise import has_divisible_optimizer
from planner.model.spec import TrainingSpec
from planner.profiler.estimated.devices import (
    DEVICES,
    ComputeClass,
    DeviceSpec,
    DType,
    OpClass,
    device_spec,
    launch_of,
    supporting,
    with_eight_bits,
)
from planner.profiler.estimated.eight_bits import EightBitProducts, eight_bit_products
from planner.profiler.estimated.execution import Execution, Fusion, compiler
from planner.profiler.estimated.experts import expert_costs, fewest_experts
from planner.profiler.estimated.repeated import (
    UnlikeBlocksError,
    costs_with_spared_blocks,
    with_spared_blocks,
)
from planner.profiler.estimated.roofline import Costs
from planner.profiler.estimated.stacks import Stack
from planner.profiler.estimated.trace import StepTrace, trace_step
from planner.profiler.lengths import other_lengths, with_lengths
from planner.profiler.make_profile import ModelFacts, make_profile
from planner.profiler.step.counters import degree_costs

_REMEDY = "see `DeviceFile` in planner/profiler/estimated/estimate.py for its fields"
_Positive = Annotated[float, Field(gt=0)]


class DeviceFile(Record):
    """A GPU, by its data sheet and, where they are known, the shares of it that it achieves.

    {"name": "My GPU", "peak_flops_per_s": {"float32": 30e12, "float16": 120e12},
     "bandwidth_bytes_per_s": 300e9, "memory_bytes": 24e9, "processors": 58, "clock": 0.5}
    """

    schema_version: Literal[1] = 1
    name: str
    peak_flops_per_s: dict[DType, _Positive]  # dense, at boost clock; "float32" at least
    bandwidth_bytes_per_s: _Positive
    memory_bytes: Annotated[int, Field(gt=0)]
    processors: Annotated[int, Field(gt=0)]  # streaming multiprocessors or compute units
    # share of the boost clock that it keeps under load
    clock: Annotated[float, Field(gt=0, le=1)] = 1.0
    # By class of operation, in place of the table's.
    achieved_arithmetic: dict[ComputeClass, _Positive] = Field(default_factory=dict)
    achieved_bandwidth: dict[OpClass, _Positive] = Field(default_factory=dict)
    launch_s: Annotated[float, Field(ge=0)] | None = None
    dispatch_s: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_single(self) -> "DeviceFile":
        if "float32" not in self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s has no float32, which every training needs")
        return self

    def spec(self) -> DeviceSpec:
        """Return the device; what the file does not say is as for the GPUs of the table."""
        like = DEVICES["v100"]
        given = self.model_dump(exclude={"schema_version", "clock"}, exclude_none=True)
        given["achieved_arithmetic"] = {**like.achieved_arithmetic, **self.achieved_arithmetic}
        given["achieved_bandwidth"] = {**like.achieved_bandwidth, **self.achieved_bandwidth}
        told = bool(self.achieved_arithmetic)
        measured = None if told else like.name
        return replace(like, **given, reported=None, like=measured).at_clock(self.clock)


def load_device(path: Path | str, dtype: DType) -> DeviceSpec:
    """Read a device from `path`.

    Raises:
        InputError: when the file cannot be used, or the device has no such arithmetic.
    """
    return supporting(load_record(DeviceFile, path, InputError, _REMEDY).spec(), dtype, f"'{path}'")


@dataclass(frozen=True)
class EstimateOptions:
    """What a model is estimated for.

    Attributes:
        device: name in the table of `devices`, such as "v100", or a device of one's own; or several
            kinds of GPUs by name, of which the profile has the times of each.
        dtype: of products and convolutions; "bfloat16" and "float16" stand for autocast.
        memory_format: that the plan's stages will have; it does not change the estimate.
        fusion: which operations are fused into one kernel, as by `compiler`; None as PyTorch runs
            them.
        master_weights: weights are in `dtype`, gradients summed in float32, and the optimizer steps
            float32 copies.
        host: kind of program that launches the kernels, of `HOSTS`, or its time per launch; None
            for "compiled" where the compiler fuses, and for what the device says otherwise, which
            is "eager" in the table.
        tensor: numbers of ranks, for each of which the costs of divided layers are estimated, too.
        precision: of the products of linear layers, where it is of 8 bits.
        experts: numbers of ranks that may divide experts across servers
            (`planner.profiler.estimated.experts`), where the model has some and the ranks of
            `tensor` cannot.
        stack: what runs the operators, in place of `fusion` and of the device's host; None for
            those.
        spares_blocks: whether few of a large mixture's equal blocks are read
            (`planner.model.capture.spared_blocks`): no training has the graph of such a profile.
        where_divided: leave out those that cannot divide the model's layers, which are refused
            otherwise.
    """

    device: str | DeviceSpec | Mapping[str, DeviceSpec]
    dtype: DType = "float32"
    memory_format: MemoryFormat | None = None
    fusion: Fusion | None = None
    master_weights: bool = False
    host: str | None = None
    tensor: Sequence[int] = ()
    where_divided: bool = False
    precision: EightBits | None = None
    stack: Stack | None = None
    experts: Sequence[int] = ()
    spares_blocks: bool = False


def estimate_profile(
    training_spec: TrainingSpec, batch_size: int, options: EstimateOptions
) -> Profile:
    """Return what each layer of a model should cost in training on a device.

    The model runs once, forward and backward, on tensors without data. Each operation takes its
    roofline time, max(flops / (peak · achieved), bytes / (bandwidth · achieved)), plus a fixed time
    per launch. The bytes that layers hold and exchange are counted as in a measured profile.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: for a device or data type that the table does not have, and for what is
            estimated only for GPUs.
    """
    estimator = Estimator(training_spec, options)
    return estimator.divided(estimator.profile(batch_size))


class Estimator:
    """Estimates profiles of a model, which it captures once for all batch sizes and tensor
    degrees.
    """

    def __init__(self, training_spec: TrainingSpec, options: EstimateOptions) -> None:
        self._training_spec, self._options = training_spec, options
        given = options.device
        self._names: tuple[str, ...] = ()  # of kinds, where there are several
        if isinstance(given, Mapping):
            self._names = tuple(given)
            specs = list(given.values())
        else:
            specs = [given if isinstance(given, DeviceSpec) else device_spec(given, options.dtype)]

        self._specs = [_with_host(spec, options) for spec in specs]
        self._eight_bits: EightBitProducts | None = None
        if options.precision is not None:
            for spec in self._specs:
                with_eight_bits(spec, options.precision)
            self._eight_bits = eight_bit_products(options.precision, self._specs)

        self._degrees = sorted(set(options.tensor) - {1})
        self._first: StepTrace | None = None
        one_cost = not self._names and not list(other_lengths(training_spec))
        self._spares_blocks = options.spares_blocks and one_cost

    def profile(self, batch_size: int) -> Profile:
        """Return the profile for microbatches of so many samples, without what ranks divide."""
        try:
            return self._profile(batch_size)
        except UnlikeBlocksError:
            # only the whole model tells what its blocks cost
            self._spares_blocks = False
            self._first = None
            return self._profile(batch_size)

    def _profile(self, batch_size: int) -> Profile:
        trace = self._trace(batch_size)
        self._first = self._first or trace
        divisible = has_divisible_optimizer(self._training_spec, trace.graph.model)
        profiles = [
            profile_of_trace(trace, spec, optimizer_elementwise=divisible) for spec in self._specs
        ]
        profile = profiles[0]
        if self._names:
            profile = profile_of_kinds(dict(zip(self._names, profiles, strict=True)))
        if trace.spared is not None:
            profile = with_spared_blocks(profile, trace.spared)

        others = []
        for lengths in other_lengths(self._training_spec):
            other = self._trace(batch_size, lengths=lengths)
            others.append(profile_of_trace(other, self._specs[0]))

        return with_lengths(profile, others, self._training_spec)

    def divided(self, profile: Profile) -> Profile:
        """Return a profile of this model with the costs of layers that ranks divide."""
        batch_size = profile.microbatch_size or 1
        costs: list[list[DegreeCosts]] = [[] for _ in self._specs]  # of each device
        for degree in list(self._degrees):
            try:
                part = self._trace(batch_size, degree)
            # a model's own plan may be one that its operations refuse
            except (InputError, LayerError, PlanError):
                if not self._options.where_divided:
                    raise
                self._degrees.remove(degree)
                continue
            for own, spec in zip(costs, self._specs, strict=True):
                of_part = profile_of_trace(part, spec)
                own.append(degree_costs(of_part, part.division, part.weights, part.counts))

        for own, more in zip(costs, self._experts(batch_size), strict=True):
            # what ranks divide as the executor does, where that is experts
            known = {each.degree: each for each in (*own, *more)}
            known |= {each.degree: each for each in own if each.by_samples}
            own[:] = [known[degree] for degree in sorted(known)]

        if not costs[0]:
            return profile
        spared = None if self._first is None else self._first.spared
        if spared is not None:
            costs = [
                [costs_with_spared_blocks(each, profile, spared) for each in own] for own in costs
            ]

        kinds = profile.kinds and tuple(
            replace(kind, tensor=tuple(own)) for kind, own in zip(profile.kinds, costs, strict=True)
        )
        return replace(profile, tensor=tuple(costs[0]), kinds=kinds)

    def _experts(self, batch_size: int) -> list[list[DegreeCosts]]:
        """Return for each device what ranks do that divide experts, and have a part of the samples
        each.
        """
        costs: list[list[DegreeCosts]] = [[] for _ in self._specs]
        if self._first is None or not fewest_experts(self._first.experts):
            return costs
        for degree in self._options.experts:
            if batch_size % degree or fewest_experts(self._first.experts) % degree:
                continue
            rank = self._trace(batch_size // degree, expert_ranks=degree)
            for own, spec in zip(costs, self._specs, strict=True):
                part = profile_of_trace(rank, spec)
                own.append(expert_costs(part, degree, rank.experts, sends_once=self._sends_once))

        return costs

    @property
    def _sends_once(self) -> bool:
        return self._options.stack is not None and self._options.stack.sends_once

    def _trace(
        self,
        batch_size: int,
        degree: int = 1,
        lengths: Mapping[str, int] | None = None,
        expert_ranks: int = 1,
    ) -> StepTrace:
        asked = self._options
        execution = Execution(
            self._specs[0].kind,
            asked.fusion,
            asked.master_weights,
            eight_bits=self._eight_bits,
            expert_ranks=expert_ranks,
        )
        if asked.stack is not None and execution.kind == "cuda":
            execution = asked.stack.running(execution)
        how = (asked.dtype, asked.memory_format, execution, degree)
        return trace_step(
            self._training_spec,
            batch_size,
            *how,
            like=self._first,
            lengths=lengths,
            spares_blocks=self._spares_blocks,
        )


def _with_host(device: DeviceSpec, options: EstimateOptions) -> DeviceSpec:
    """Return the device with the host that launches its kernels, and with those of a stack."""
    _check_kind(device, options)
    if options.stack is not None:
        device = options.stack.on(device)
    host = options.host or ("compiled" if options.fusion is compiler else None)
    if host is None or device.kind == "cpu":
        return device
    return replace(device, dispatch_s=launch_of(host))


def _check_kind(device: DeviceSpec, options: EstimateOptions) -> None:
    of_gpus = {
        "compile": options.fusion,
        "host": options.host,
        "precision": options.precision,
        "stack": options.stack is not None and options.stack.fuses_anything,
    }
    for name, given in of_gpus.items():
        if given and device.kind == "cpu":
            raise InputError(
                f"`{name}` cannot be estimated for a CPU",
                hint="name a GPU, such as `device=a100`, or measure on the CPU",
            )


def profile_of_trace(
    trace: StepTrace, spec: DeviceSpec, *, optimizer_elementwise: bool | None = None
) -> Profile:
    """Return the profile of a traced step on such a device."""
    threads = 1 if spec.kind == "cpu" else None
    products = trace.products
    device = Device(
        kind=spec.kind,
        name=spec.name,
        threads=threads,
        memory_bytes=spec.memory_bytes,
        peak_flops_per_s=spec.peak(products or trace.dtype) if spec.kind == "cuda" else None,
        shares_of=spec.like,
    )
    measurement = trace.estimate(spec)
    if trace.unfused is not None:
        measurement = replace(measurement, compiled=_compiled(trace, trace.unfused, spec))
    facts = ModelFacts(
        optimizer_elementwise=optimizer_elementwise,
        tokens_per_sample=trace.tokens_per_sample,
        tf32=trace.dtype == TF32,
        sizes="example" if trace.with_data else None,
        products=products,
        stack=trace.stack,
        loss_chunks=trace.loss_chunks,
    )
    return make_profile(trace.model, trace.graph, trace.extent, measurement, device, facts)


def _compiled(trace: StepTrace, unfused: Costs, spec: DeviceSpec) -> Compiled:
    """Return the sums of the step, compiled as one run, and without fusing anything."""
    forward, backward, _ = trace.layer_seconds(spec)
    uncompiled = replace(trace, costs=unfused).layer_seconds(spec)
    return Compiled(
        runs=(trace.graph.layers[0].name,),
        runs_forward_s=sum(forward),
        runs_backward_s=sum(backward),
        uncompiled_forward_s=sum(uncompiled[0]),
        uncompiled_backward_s=sum(uncompiled[1]),
    )
