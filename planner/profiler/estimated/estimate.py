"""Estimate the profile of a model file for a device that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.formats.profile import TF32, Device, MemoryFormat, Profile
from planner.model.spec import TrainingSpec
from planner.profiler.estimated.calibrate import Calibration, calibrated
from planner.profiler.estimated.devices import DeviceSpec, DType, device_spec
from planner.profiler.estimated.execution import Execution, Fusion
from planner.profiler.estimated.trace import StepTrace, trace_step
from planner.profiler.measured.make_profile import make_profile


@dataclass(frozen=True)
class EstimateOptions:
    """What a model is estimated for.

    Attributes:
        device: name in the table of `devices`, such as "v100", or a device of one's own.
        dtype: of products and convolutions; "bfloat16" and "float16" stand for autocast.
        memory_format: that the plan's stages will have; it does not change the estimate.
        calibration: measured profiles to fit the achieved shares to first.
        fusion: which operations are fused into one kernel; None as PyTorch runs them.
        master_weights: weights and gradients are in `dtype`, and the optimizer updates copies in float32.
    """

    device: str | DeviceSpec
    dtype: DType = "float32"
    memory_format: MemoryFormat | None = None
    calibration: Sequence[Calibration] = ()
    fusion: Fusion | None = None
    master_weights: bool = False


def estimate_profile(training_spec: TrainingSpec, batch_size: int, options: EstimateOptions) -> Profile:
    """Return what each layer of a model should cost in training on a device.

    The model runs once, forward and backward, on tensors without data. Each operation takes its roofline time,
    max(flops / (peak · achieved), bytes / (bandwidth · achieved)), plus a fixed time per launch. The bytes that layers
    hold and exchange are counted as in a measured profile.

    Args:
        training_spec: the model, its loss and its optimizer.
        batch_size: samples of the (micro)batch.
        options: the device and more.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: for a device or data type that the table does not have.
    """
    dtype = options.dtype
    device = options.device if isinstance(options.device, DeviceSpec) else device_spec(options.device, dtype)
    spec = calibrated(device, options.calibration, dtype)
    execution = Execution(spec.kind, options.fusion, options.master_weights)
    return profile_of_trace(trace_step(training_spec, batch_size, dtype, options.memory_format, execution), spec)


def profile_of_trace(trace: StepTrace, spec: DeviceSpec) -> Profile:
    """Return the profile of a traced step on such a device."""
    threads = 1 if spec.kind == "cpu" else None
    device = Device(kind=spec.kind, name=spec.name, threads=threads, memory_bytes=spec.memory_bytes)
    profile = make_profile(trace.model, trace.graph, trace.batch_size, trace.estimate(spec), device)
    return profile.model_copy(update={"dtype": TF32}) if trace.dtype == TF32 else profile
