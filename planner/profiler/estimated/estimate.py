"""Model file -> estimated Profile, for a device that need not be there."""

from __future__ import annotations

from collections.abc import Sequence

from planner.formats.profile import Device, MemoryFormat, Profile
from planner.model.spec import TrainingSpec
from planner.profiler.estimated.calibrate import Calibration, calibrated
from planner.profiler.estimated.devices import DeviceSpec, DType, device_spec
from planner.profiler.estimated.trace import StepTrace, trace_step
from planner.profiler.measured.measure import Measurement
from planner.profiler.measured.profile import make_profile
from planner.profiler.measured.steps import StepTimes


def estimate_profile(
    training_spec: TrainingSpec,
    batch_size: int,
    *,
    device: str,
    dtype: DType = "float32",
    memory_format: MemoryFormat | None = None,
    calibration: Sequence[Calibration] = (),
) -> Profile:
    """What each layer of a model should cost in training on a device of the table in `devices`.

    The model is run once, forward and backward, on tensors without data. Each operation takes its roofline time,
    max(flops / (peak · achieved), bytes / (bandwidth · achieved)), plus a fixed time per launch; bytes that layers
    hold and exchange are counted as in a measured profile.

    Args:
        training_spec: the model, its loss and its optimizer.
        batch_size: samples of the (micro)batch.
        device: name in the table, such as "v100".
        dtype: of products and convolutions; "bfloat16" and "float16" stand for autocast.
        memory_format: that the plan's stages are to have; it does not change the estimate.
        calibration: measured profiles to fit the achieved shares to first.

    Raises:
        ModelFileError, CaptureError: when the model file or the model cannot be used.
        InputError: for a device or data type that the table does not have.
    """
    spec = calibrated(device_spec(device, dtype), calibration, dtype)
    trace = trace_step(training_spec, batch_size, dtype, memory_format)
    return profile_of_trace(training_spec, trace, spec, dtype)


def profile_of_trace(training_spec: TrainingSpec, trace: StepTrace, spec: DeviceSpec, dtype: DType) -> Profile:
    """The profile of a traced step on such a device."""
    forward, backward, _ = trace.layer_seconds(spec)
    layers = [StepTimes([forward_s], [backward_s]) for forward_s, backward_s in zip(forward, backward, strict=True)]
    measured = Measurement(layers, StepTimes(), trace.updates(spec), trace.saved_bytes, adding=trace.adding(spec))
    described = Device(
        kind=spec.kind,
        name=spec.name,
        threads=1 if spec.kind == "cpu" else None,
        memory_bytes=spec.memory_bytes,
    )
    return make_profile(
        training_spec,
        trace.graph,
        trace.batch_size,
        measured,
        described,
        None,
        dtype=dtype if dtype == "tf32" else None,
    )
