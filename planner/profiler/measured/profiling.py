"""Measure a model file on a device -> Profile."""

import gc
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from planner.errors import InputError, PlannerError
from planner.formats.files import replace
from planner.formats.profile import TF32, LossMean, Profile
from planner.model.batch import Batch
from planner.model.batch_norm import warn_before_a_plan
from planner.model.capture.capture import capture_file
from planner.model.capture.failure import run_failure, warn_of_unregistered
from planner.model.capture.graph import LayerGraph
from planner.model.capture.parameters import refuse_changed_parameters
from planner.model.capture.pins import warn_of_only_size
from planner.model.elementwise import has_divisible_optimizer
from planner.model.generators import seeded
from planner.model.lengths import extent_of
from planner.model.modes import warn_of_modes
from planner.model.options import ModuleOptions, autocast_dtype
from planner.model.spec import TrainingSpec
from planner.model.stage.capture_check import can_be_checked, check_captured, further_batches
from planner.model.stage.code import check_compiler
from planner.options.profiling import SECONDS, ProfileOptions
from planner.profiler.lengths import other_lengths, with_lengths
from planner.profiler.loss_mean.find import find_loss_mean
from planner.profiler.make_profile import Measurement, ModelFacts, make_profile
from planner.profiler.measured.optimizer import try_optimizer
from planner.profiler.measured.other_processes import check_processes, contention, disturbance
from planner.profiler.measured.part_by_part import measure_in_parts
from planner.profiler.measured.step_measurement import StepMeasurement, measure_degrees
from planner.profiler.step.timing import Effort, ProgressCallback, step_failure
from planner.profiler.this_machine import (
    check_positive,
    describe_device,
    parse_device,
    thread_count,
)
from planner.runtime import runtime_of
from planner.workers.numerics import Numerics, computing
from planner.workers.place import kind_here, set_gpu_variables

_log = logging.getLogger(__name__)
LEAST_REPEATS = 3
# a GPU raises its clock, and its libraries load and choose kernels, over several steps
WARMUP_CPU = 2
WARMUP_GPU = 10


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions(ProfileOptions):
    """How a model is measured, and what that says of the modules and the device."""

    @property
    def stage(self) -> ModuleOptions:
        """How stages run."""
        half = None
        if self.dtype != TF32:
            half = autocast_dtype(self.dtype)
        if self.master_weights and half is None:
            raise InputError(
                f"`dtype={self.dtype}` needs no master weights",
                hint="give `dtype=bfloat16`, or leave them out",
            )

        layout = self.memory_format == "channels-last"
        autocast = None if self.master_weights else half
        return ModuleOptions(
            autocast, layout, self.compile, half=half if self.master_weights else None
        )

    @property
    def numerics(self) -> Numerics:
        """How numbers are computed."""
        return Numerics(self.dtype == TF32, self.deterministic)

    def checked_device(self) -> torch.device:
        """Return the device; raise InputError when it does not exist, or another option cannot be
        used on it.
        """
        for name, number in (("threads", self.threads), ("repeats", self.repeats)):
            check_positive(name, number)
        if not 0 <= self.seconds < float("inf"):
            raise InputError(
                f"`seconds={self.seconds:g}` is no time to measure for",
                hint=f"give `seconds={SECONDS:g}`",
            )

        if self.threads > (cores := os.cpu_count() or self.threads):
            raise InputError(
                f"`threads={self.threads}` is more than this machine's {cores} cores",
                hint="a worker's threads need a core each",
            )

        device = parse_device(self.device or kind_here())
        self.numerics.check(device.type)
        if self.tensor and self.compile:
            message = (
                "tensor-parallel layers are measured in uncompiled steps, and not with "
                "`tensor` and `compile`"
            )
            raise InputError(message, hint="leave out one of them")

        if self.stage.compiled:
            check_compiler(device.type)
        return device


def profile_model(
    spec: TrainingSpec,
    batch_size: int,
    options: ProfilingOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measure what each layer of a model costs in training, with (micro)batches of `batch_size`
    samples.

    Times are medians over whole training steps with marks between the layers. In between, the model
    runs as the user wrote it, for `whole_step`. Weights are not trained: the optimizer steps with a
    learning rate of zero.
    """
    options = options or ProfilingOptions()
    set_gpu_variables()  # as in the workers, whose contexts take as much memory
    check_positive("batch_size", batch_size)
    device = options.checked_device()
    check_processes(options.processes, options.threads, device, spec)
    warmup = WARMUP_CPU
    if runtime_of(device).asynchronous:
        warmup = WARMUP_GPU
    effort = Effort(options.seconds, options.repeats, min(LEAST_REPEATS, options.repeats), warmup)
    if progress is not None:
        effort = replace(effort, progress=progress)
    # Libraries ask for the current device, and a context on another GPU would take memory there.
    current = runtime_of(device).current(device)
    kept = runtime_of(device).random_state_kept(device)
    # The same weights and batch each time, so that profiles are comparable.
    with current, thread_count(options.threads), computing(options.numerics), kept, seeded(0):
        effort.progress("capturing", 0.0)
        # At the greatest lengths first, and then at others if they vary.
        batch, *others = (
            spec.example_batch(batch_size, each) for each in (None, *other_lengths(spec))
        )
        model = spec.build_model()
        warn_of_unregistered(model)
        warn_of_modes(model)
        # For the device itself: `options.device` may have the number of a GPU.
        graph = capture_file(spec, batch, model, options=replace(options.stage, device=device.type))
        warn_before_a_plan(graph.model)
        warn_of_only_size(graph, spec)
        separable = try_optimizer(spec, graph.model, device)
        contended = contention(
            spec, batch_size, options.processes - 1, threads=options.threads, options=options.stage
        )
        # What the first calls of the model do not change, later ones may.
        with refuse_changed_parameters(graph.model), contended:
            half = effort
            if others:
                half = replace(effort, seconds=effort.seconds / 2)
            measured = _measure(spec, graph, batch, device, half, options)
            share = replace(half, seconds=half.seconds / max(1, len(others)))
            shorter = [_measure(spec, graph, each, device, share, options) for each in others]
            degrees = set(options.tensor) - {1}
            tensor = None
            if degrees:
                tensor = measure_degrees(spec, graph, batch, effort, sorted(degrees))

    checked = _check_captured(spec, graph, (batch, *others[-1:]), device, options)
    loss = _loss_mean(spec, graph, batch, device, options)
    described = describe_device(device, options.threads, options.processes)
    is_on_host = bool(measured.passes) and device.type == "cpu"
    facts = ModelFacts(
        loss=loss,
        capture_checked=True if checked else None,
        deterministic=True if options.deterministic else None,
        optimizer_elementwise=has_divisible_optimizer(spec, graph.model),
        optimizer_separable=separable,
        tokens_per_sample=batch.tokens_per_sample,
        tensor=tensor,
        tf32=options.numerics.tf32,
        disturbance=disturbance(measured.passes, options.threads) if is_on_host else None,
    )
    make = partial(make_profile, spec.name, graph, device=described)
    profile = make(extent_of(batch, graph.lengths), measured, facts=facts)
    profiles = [
        make(extent_of(each, graph.lengths), costs)
        for each, costs in zip(others, shorter, strict=True)
    ]
    return with_lengths(profile, profiles, spec)


def _check_captured(
    spec: TrainingSpec,
    graph: LayerGraph,
    batches: Sequence[Batch],
    device: torch.device,
    options: ProfilingOptions,
) -> bool:
    """Compare the captured layers with the model; return whether that was possible: the device may
    hold parts only.
    """
    if not can_be_checked(graph, device.type):
        _log.warning(
            f"warning: the captured layers were not compared with the model, which {device} does "
            f"not hold as a whole"
        )
        return False

    batches = [batch.to(device) for batch in batches]
    with thread_count(options.threads), runtime_of(device).random_state_kept(device):
        further = further_batches(spec, graph, batches[0])
        check_captured(spec, graph, [*batches, *further], options.stage)

    return True


def _loss_mean(
    spec: TrainingSpec,
    graph: LayerGraph,
    batch: Batch,
    device: torch.device,
    options: ProfilingOptions,
) -> LossMean | None:
    """Return what the loss is a mean over; None where only parts of the model fit the device."""
    if not can_be_checked(graph, device.type):
        return None
    batch = batch.to(device)
    with thread_count(options.threads), runtime_of(device).random_state_kept(device):
        try:
            return find_loss_mean(spec, graph, batch, options.stage)
        except (PlannerError, torch.OutOfMemoryError):
            raise
        # whatever the user's forward or loss raises on a batch, or on a part of it
        except Exception as cause:
            raise run_failure(cause, graph.model, batch.size) from cause


def _measure(
    spec: TrainingSpec,
    graph: LayerGraph,
    batch: Batch,
    device: torch.device,
    effort: Effort,
    options: ProfilingOptions,
) -> Measurement:
    """Measure the whole model at once, or part by part where it does not fit the device."""
    if _may_fit(graph, device):
        try:
            return StepMeasurement(spec, graph, batch, device).measure(
                effort, compiled=options.compile
            )
        except torch.OutOfMemoryError as cause:
            if options.compile:
                raise step_failure(cause) from cause
        # Outside of the handler, whose traceback keeps the step's tensors alive.
        _log.warning(f"the memory of {device} does not hold a step: measuring it layer by layer")
        graph.model.zero_grad(set_to_none=True)
        graph.model.to("cpu")
        gc.collect()
        runtime_of(device).empty_cache()

    return measure_in_parts(spec, graph, batch, device, effort)


def _may_fit(graph: LayerGraph, device: torch.device) -> bool:
    """Return whether the device has room for the weights and their gradients, without which no step
    can be tried.
    """
    if not runtime_of(device).counts_memory:
        return True
    needed = sum(p.nbytes * (1 + p.requires_grad) for p in graph.model.parameters())
    return needed < runtime_of(device).free_and_total_bytes(device)[0]
