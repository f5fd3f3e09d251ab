"""Fit the shares of its peaks that a device achieves to profiles measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner.errors import InputError
from planner.formats.profile import Profile, load_profile
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.estimated.devices import COMPUTE_CLASSES, OP_CLASSES, DeviceSpec, DType
from planner.profiler.estimated.execution import Execution
from planner.profiler.estimated.known_steps import KnownTimes, fit_times, holds_steps, load_steps
from planner.profiler.estimated.least_squares import Floats, least_squares
from planner.profiler.estimated.trace import StepTrace, trace_step

# Weight of the table, where a profile has weight 1: shares that no profile depends on stay as they are.
_TRUST_IN_TABLE = 1e-5
_LEAST_S = 1e-7  # shorter times are noise


@dataclass(frozen=True)
class Calibration:
    """A measured profile and its model file."""

    profile: Profile
    training_spec: TrainingSpec


def load_calibration(path: Path | str, model: str | Path | None = None) -> Calibration | KnownTimes:
    """Load a measured profile with its model file, or steps whose times are known.

    Args:
        model: the profile's model file; None for the model.py beside it.

    Raises:
        ProfileError, ModelFileError: when a file cannot be used.
        InputError: when the profile was not measured.
    """
    if holds_steps(path):
        return load_steps(path)
    profile = load_profile(path)
    if profile.provenance.source != "measured":
        message = f"'{path}' is {profile.provenance.source}, not measured"
        raise InputError(message, hint="calibrate with a profile of `plan profile`")
    return Calibration(profile, load_model_file(model if model is not None else Path(path).parent / "model.py"))


def calibrated(spec: DeviceSpec, calibrations: Sequence[Calibration | KnownTimes], dtype: DType) -> DeviceSpec:
    """Return `spec` fitted to profiles (its shares and launch time), and then to steps (two factors).

    Without calibrations it is `spec` itself.

    Raises:
        InputError: for a profile of another kind of device, or of another model than its model file's.
    """
    profiles = [each for each in calibrations if isinstance(each, Calibration)]
    known = [each for each in calibrations if isinstance(each, KnownTimes)]
    fitted = _fitted_to_profiles(spec, profiles, dtype) if profiles else spec
    if known:
        fitted = fit_times(fitted, [step for each in known for step in each.timed(fitted.kind)])
    models = ", ".join(dict.fromkeys([each.profile.model for each in profiles] + [each.models for each in known]))
    return replace(fitted, name=f"{fitted.name}, calibrated on {models}") if models else spec


def _fitted_to_profiles(spec: DeviceSpec, calibrations: Sequence[Calibration], dtype: DType) -> DeviceSpec:
    for calibration in calibrations:
        if calibration.profile.device.kind != spec.kind:
            raise InputError(
                f"a profile of {calibration.profile.device.name} ({calibration.profile.device.kind}) cannot calibrate "
                f"{spec.name}, which is of kind {spec.kind}",
                hint="give a profile that was measured on such a device",
            )
    samples = [(_trace_of(calibration, dtype), calibration.profile) for calibration in calibrations]
    device = calibrations[0].profile.device
    return replace(fit(spec, samples), name=device.name, memory_bytes=device.memory_bytes)


def _trace_of(calibration: Calibration, dtype: DType) -> StepTrace:
    profile = calibration.profile
    # The type it was measured with. Whether float32 products used TF32 on a GPU is not recorded, so the user says it.
    of_profile: DType = profile.autocast or ("tf32" if dtype == "tf32" else "float32")
    trace = trace_step(
        calibration.training_spec,
        profile.microbatch_size or 1,
        of_profile,
        profile.memory_format,
        Execution("cuda" if profile.device.kind == "cuda" else "cpu", "compiler" if profile.compiled else None),
    )
    if trace.graph.hash != profile.graph_hash:
        raise InputError(
            f"the profile of '{profile.model}' is not of the model in '{calibration.training_spec.origin}'",
            hint="profile the model again, or put its model.py beside the profile",
        )
    return trace


def fit(spec: DeviceSpec, samples: Sequence[tuple[StepTrace, Profile]]) -> DeviceSpec:
    """Minimise the squares of log(estimated / measured) over the forward, backward and update of layers.

    An error's weight is the square root of the layer's share of its profile's time: long layers matter, and short ones
    are many. The unknowns are the logarithms of the launch time and of the achieved shares of the classes that occur.
    The method is Levenberg-Marquardt (Marquardt 1963).
    """
    unknowns = _Unknowns(spec, samples)
    measured = [_measured(profile) for _, profile in samples]
    weights = np.concatenate([np.sqrt(times / times.sum()) * (times > _LEAST_S) for times in measured])
    target = np.log(np.maximum(np.concatenate(measured), _LEAST_S))

    def residuals(logs: Floats) -> Floats:
        guess = unknowns.spec(logs)
        times = np.concatenate([np.concatenate(trace.layer_seconds(guess)) for trace, _ in samples])
        errors = weights * (np.log(np.maximum(times, _LEAST_S)) - target)
        return np.concatenate([errors, np.sqrt(_TRUST_IN_TABLE) * (logs - unknowns.start)])

    return unknowns.spec(least_squares(residuals, unknowns.start))


def _measured(profile: Profile) -> Floats:
    """Return forward, backward and update of all layers; processor time where it is known, without interruptions."""

    def column(part: str, better: str) -> list[float]:
        times = [(getattr(layer, better, None), getattr(layer, part)) for layer in profile.layers]
        return [wall_s if thread_s is None else thread_s for thread_s, wall_s in times]

    forward, backward = column("forward_s", "forward_thread_s"), column("backward_s", "backward_thread_s")
    return np.array([*forward, *backward, *(layer.update_s for layer in profile.layers)], dtype=np.float64)


class _Unknowns:
    """The fitted shares and launch time, as one vector of logarithms."""

    def __init__(self, spec: DeviceSpec, samples: Sequence[tuple[StepTrace, Profile]]) -> None:
        self._spec = spec
        occurring = {name for trace, _ in samples for name in trace.costs.classes()} | {"update"}
        self._arithmetic = [name for name in COMPUTE_CLASSES if name in occurring]
        self._bandwidth = [name for name in OP_CLASSES if name in occurring]
        arithmetic = [spec.achieved_arithmetic[name] for name in self._arithmetic]
        bandwidth = [spec.achieved_bandwidth[name] for name in self._bandwidth]
        self.start: Floats = np.log([*arithmetic, *bandwidth, spec.launch_s])

    def spec(self, logs: Floats) -> DeviceSpec:
        """Return the device that these logarithms describe."""
        *shares, launch_s = map(float, np.exp(np.clip(logs, -50, 50)))
        split = len(self._arithmetic)
        arithmetic = dict(self._spec.achieved_arithmetic) | dict(zip(self._arithmetic, shares[:split], strict=True))
        bandwidth = dict(self._spec.achieved_bandwidth) | dict(zip(self._bandwidth, shares[split:], strict=True))
        return replace(self._spec, achieved_arithmetic=arithmetic, achieved_bandwidth=bandwidth, launch_s=launch_s)
