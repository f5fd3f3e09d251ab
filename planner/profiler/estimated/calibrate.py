"""Fit a device to what was measured on it: profiles, or whole steps whose times are known.

Profiles determine the shares of the peaks that each class of kernels achieves. Few sums of steps,
such as those that a log says, cannot tell the classes apart. So they determine two factors: one of
all shares of the arithmetic, and one of all shares of the bandwidth (clocks that fall under load,
caches). With measured sums t of estimates e(x), where x are the logarithms of the factors, the fit
minimises

    sum((log(e(x) / t) / 0.05)²) + sum((x / 0.16)²)

that is: a step's estimate is right to 5% once the factors are, and the table's shares are right to
16%.

Such a fit is used only where it has been seen to help with what it was not fitted to. The steps are
put into groups: for a model that is among them each model and batch size is one, for others each
model. Every group is left out in turn, and its error with a fit to the others is compared with the
table's. The mean gain must exceed three of its standard errors, over three groups or more: a
smaller one, of few steps, is chance.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from planner.errors import InputError
from planner.formats.files import Record, load_record, read_json
from planner.formats.profile import Profile, load_profile
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.estimated.devices import COMPUTE_CLASSES, OP_CLASSES, DeviceSpec, DType
from planner.profiler.estimated.execution import Execution, compiler
from planner.profiler.estimated.trace import StepTrace, trace_step

Floats = NDArray[np.float64]

_REMEDY = "see `KnownStep` in planner/profiler/estimated/calibrate.py for its fields"
_STEP_ERROR = 0.05  # of an estimate with the right factors
_SHARE_ERROR = 0.16  # of the table's shares
# that say whether a fit helps, and standard errors of the gain
_LEAST_GROUPS, _LEAST_ERRORS = 3, 3.0
_Seconds = Annotated[float, Field(gt=0)]
# Weight of the table, where a profile has weight 1: shares that no profile depends on stay as they
# are.
_TRUST_IN_TABLE = 1e-5
_LEAST_S = 1e-7  # shorter times are noise
_ITERATIONS = 60
_STEP = 1e-4  # for the derivatives


def least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Return a local minimum of the sum of squares, starting from `start`."""
    best, error = start, residuals(start)
    damping = 1e-2
    for _ in range(_ITERATIONS):
        slopes = np.stack(
            [(residuals(best + _STEP * unit) - error) / _STEP for unit in np.eye(len(best))], axis=1
        )
        normal = slopes.T @ slopes
        while damping < 1e8:
            # Without the small constant, an unknown that no time depends on would make the matrix
            # singular.
            step = np.linalg.solve(
                normal + damping * np.diag(np.diag(normal) + 1e-12), -slopes.T @ error
            )
            # The clip keeps a trial step within a factor e of the shares, where the slopes still
            # hold.
            candidate = best + np.clip(step, -1, 1)
            new = residuals(candidate)
            if new @ new < error @ error:
                break
            damping *= 4
        else:
            return best
        gain = 1 - (new @ new) / (error @ error)
        best, error, damping = candidate, new, damping / 3
        if gain < 1e-7:
            break
    return best


class KnownStep(Record):
    """A training step on one device, and how long it took: the whole, or some of its parts."""

    model: str  # model file, relative to this file
    batch_size: Annotated[int, Field(ge=1)]
    dtype: DType = "float32"
    fusion: Literal["compiler"] | None = None
    master_weights: bool = False
    sums_in_half: bool = False  # of gradients, with master weights
    step_s: _Seconds | None = None  # forward, backward and update
    forward_s: _Seconds | None = None
    backward_s: _Seconds | None = None
    update_s: _Seconds | None = None

    @model_validator(mode="after")
    def _check_times(self) -> "KnownStep":
        if not self.times:
            raise ValueError("a step has none of step_s, forward_s, backward_s and update_s")
        return self

    @property
    def times(self) -> dict[tuple[int, ...], float]:
        """The known sums, by which of forward, backward and update they contain."""
        parts = {
            (0, 1, 2): self.step_s,
            (0,): self.forward_s,
            (1,): self.backward_s,
            (2,): self.update_s,
        }
        return {part: seconds for part, seconds in parts.items() if seconds is not None}


class KnownSteps(Record):
    """Steps on one type of device.

    {"schema_version": 1,
     "steps": [{"model": "gpt.py", "batch_size": 4, "dtype": "float16", "fusion": "compiler",
                "master_weights": true, "forward_s": 0.131, "backward_s": 0.274}]}
    """

    schema_version: Literal[1] = 1
    steps: Annotated[tuple[KnownStep, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Calibration:
    """What was measured on a device, a profile or a step, and the model file."""

    measured: Profile | KnownStep
    training_spec: TrainingSpec


@dataclass(frozen=True)
class Timed:
    """A sum that was measured, and its estimate for a device."""

    measured_s: float
    estimated_s: Callable[[DeviceSpec], float]


def load_calibration(path: Path | str) -> list[Calibration]:
    """Load a measured profile with the model.py beside it, or steps whose times are known.

    Raises:
        ProfileError, ModelFileError: when a file cannot be used.
        InputError: when the profile was not measured.
    """
    folder = Path(path).parent
    try:
        content = read_json(path)
    except (OSError, ValueError):
        content = None  # load_profile says what is wrong
    if isinstance(content, dict) and "steps" in content:
        steps = load_record(KnownSteps, path, InputError, _REMEDY).steps
        return [Calibration(step, load_model_file(folder / step.model)) for step in steps]
    profile = load_profile(path)
    if profile.provenance.source != "measured":
        message = f"'{path}' is {profile.provenance.source}, not measured"
        raise InputError(message, hint="calibrate with a profile of `plan profile`")
    return [Calibration(profile, load_model_file(folder / "model.py"))]


def calibrated(
    spec: DeviceSpec,
    calibrations: Sequence[Calibration],
    dtype: DType,
    target: TrainingSpec | None = None,
) -> DeviceSpec:
    """Return `spec` fitted to profiles (its shares and launch time), and then to steps (two
    factors).

    Without calibrations it is `spec` itself. `target` is the model to estimate; None for one that
    is not known.

    Raises:
        InputError: for a profile of another kind of device, or of another model than its model
            file's.
    """
    fitted, samples, groups = spec, [], dict[Hashable, list[Timed]]()
    own = target is not None and any(
        _model(each.training_spec) == _model(target) for each in calibrations
    )
    for each in calibrations:
        if isinstance(each.measured, Profile):
            samples.append(
                (_trace_of(each.measured, each.training_spec, spec, dtype), each.measured)
            )
        else:
            group = _model(each.training_spec), each.measured.batch_size if own else None
            groups.setdefault(group, []).extend(
                _timed(each.measured, each.training_spec, spec.kind)
            )
    if samples:
        device = samples[0][1].device
        fitted = replace(
            fit(spec, samples), name=device.name, memory_bytes=device.memory_bytes, like=None
        )
    if groups and (better := fit_times(fitted, list(groups.values()))) is not None:
        fitted = better
    elif len(groups) >= _LEAST_GROUPS:
        return replace(
            fitted,
            name=f"{fitted.name}, not calibrated: known steps do not predict each other any better",
        )
    elif groups:
        what = "batch sizes" if own else "models"
        return replace(
            fitted,
            name=f"{fitted.name}, not calibrated: that takes steps of {_LEAST_GROUPS} {what}",
        )
    models = [profile.model for _, profile in samples]
    models += [
        each.training_spec.name for each in calibrations if isinstance(each.measured, KnownStep)
    ]
    if not models:
        return spec
    name = f"{fitted.name}, calibrated on {', '.join(dict.fromkeys(models))}"
    return replace(fitted, name=name, like=None)


def _model(training_spec: TrainingSpec) -> Hashable:
    path = training_spec.path
    return None if path is None else path.resolve(), training_spec.builder


def _timed(
    step: KnownStep, training_spec: TrainingSpec, kind: Literal["cpu", "cuda"]
) -> list[Timed]:
    """Trace a step, and return its sums; raise InputError for what is estimated only for GPUs."""
    if kind == "cpu" and (step.fusion is not None or step.master_weights):
        raise InputError(
            f"the step of '{step.model}' ran on a GPU, and the estimate is for a CPU",
            hint="leave 'fusion' and 'master_weights' out of the file, or name a GPU",
        )
    execution = Execution(
        kind, None if step.fusion is None else compiler, step.master_weights, step.sums_in_half
    )
    trace = trace_step(training_spec, step.batch_size, step.dtype, execution=execution)
    return [
        Timed(measured_s, partial(_sum, trace, parts)) for parts, measured_s in step.times.items()
    ]


def _sum(trace: StepTrace, parts: Iterable[int], spec: DeviceSpec) -> float:
    seconds = trace.layer_seconds(spec)
    return sum(sum(seconds[part]) for part in parts)


def _trace_of(
    profile: Profile, training_spec: TrainingSpec, spec: DeviceSpec, dtype: DType
) -> StepTrace:
    """Trace the step that the profile measured."""
    if profile.device.kind != spec.kind:
        raise InputError(
            f"a profile of {profile.device.name} ({profile.device.kind}) cannot calibrate "
            f"{spec.name}, which is of "
            f"kind {spec.kind}",
            hint="give a profile that was measured on such a device",
        )
    trace = trace_step(
        training_spec,
        profile.microbatch_size or 1,
        # Whether float32 products used TF32 on a GPU is not recorded in older profiles, so the user
        # says it.
        profile.autocast or ("tf32" if dtype == "tf32" else "float32"),
        profile.memory_format,
        Execution(spec.kind, compiler if profile.compiled else None),
    )
    if trace.graph.hash != profile.graph_hash:
        raise InputError(
            f"the profile of '{profile.model}' is not of the model in '{training_spec.origin}'",
            hint="profile the model again, or put its model.py beside the profile",
        )
    return trace


def fit_times(spec: DeviceSpec, groups: Sequence[Sequence[Timed]]) -> DeviceSpec | None:
    """Return the device with both factors fitted; None where fits to all groups but one do not help
    with that one.
    """
    if len(groups) < _LEAST_GROUPS:
        return None
    gains = []
    for group in groups:
        fitted = _fit_factors(
            spec, [each for other in groups if other is not group for each in other]
        )
        gains.append(fmean(_error(spec, each) - _error(fitted, each) for each in group))
    if fmean(gains) <= _LEAST_ERRORS * stdev(gains) / math.sqrt(len(gains)):
        return None
    return _fit_factors(spec, [each for group in groups for each in group])


def _error(spec: DeviceSpec, timed: Timed) -> float:
    return abs(float(np.log(timed.estimated_s(spec) / timed.measured_s)))


def _fit_factors(spec: DeviceSpec, timed: Sequence[Timed]) -> DeviceSpec:
    measured = np.log([each.measured_s for each in timed])

    def residuals(logs: Floats) -> Floats:
        guess = scaled(spec, *np.exp(logs).tolist())
        errors = np.log([each.estimated_s(guess) for each in timed]) - measured
        return np.concatenate([errors / _STEP_ERROR, logs / _SHARE_ERROR])

    return scaled(spec, *np.exp(least_squares(residuals, np.zeros(2))).tolist())


def scaled(spec: DeviceSpec, arithmetic: float, bandwidth: float) -> DeviceSpec:
    """Return the device with its achieved shares times these factors."""
    return replace(
        spec,
        achieved_arithmetic={
            name: arithmetic * share for name, share in spec.achieved_arithmetic.items()
        },
        achieved_bandwidth={
            name: bandwidth * share for name, share in spec.achieved_bandwidth.items()
        },
    )


def fit(spec: DeviceSpec, samples: Sequence[tuple[StepTrace, Profile]]) -> DeviceSpec:
    """Minimise the squares of log(estimated / measured) over the forward, backward and update of
    layers.

    An error's weight is the square root of the layer's share of its profile's time: long layers
    matter, and short ones are many. The unknowns are the logarithms of the launch time and of the
    achieved shares of the classes that occur. The method is Levenberg-Marquardt (Marquardt 1963).
    """
    occurring = {name for trace, _ in samples for name in trace.costs.classes()} | {"update"}
    computing = [name for name in COMPUTE_CLASSES if name in occurring]
    moving = [name for name in OP_CLASSES if name in occurring]
    shares = [spec.achieved_arithmetic[name] for name in computing] + [
        spec.achieved_bandwidth[name] for name in moving
    ]
    start: Floats = np.log([*shares, spec.launch_s])
    measured = [_measured(profile) for _, profile in samples]
    weights = np.concatenate(
        [np.sqrt(times / times.sum()) * (times > _LEAST_S) for times in measured]
    )
    target = np.log(np.maximum(np.concatenate(measured), _LEAST_S))

    def described(logs: Floats) -> DeviceSpec:
        *shares, launch_s = map(float, np.exp(np.clip(logs, -50, 50)))
        split = len(computing)
        arithmetic = dict(spec.achieved_arithmetic) | dict(
            zip(computing, shares[:split], strict=True)
        )
        bandwidth = dict(spec.achieved_bandwidth) | dict(zip(moving, shares[split:], strict=True))
        return replace(
            spec, achieved_arithmetic=arithmetic, achieved_bandwidth=bandwidth, launch_s=launch_s
        )

    def residuals(logs: Floats) -> Floats:
        guess = described(logs)
        times = np.concatenate([np.concatenate(trace.layer_seconds(guess)) for trace, _ in samples])
        errors = weights * (np.log(np.maximum(times, _LEAST_S)) - target)
        return np.concatenate([errors, np.sqrt(_TRUST_IN_TABLE) * (logs - start)])

    return described(least_squares(residuals, start))


def _measured(profile: Profile) -> Floats:
    """Return forward, backward and update of all layers; processor time where it is known, without
    interruptions.
    """

    def column(part: str, better: str) -> list[float]:
        times = [(getattr(layer, better, None), getattr(layer, part)) for layer in profile.layers]
        return [wall_s if thread_s is None else thread_s for thread_s, wall_s in times]

    forward, backward = (
        column("forward_s", "forward_thread_s"),
        column("backward_s", "backward_thread_s"),
    )
    return np.array(
        [*forward, *backward, *(layer.update_s for layer in profile.layers)], dtype=np.float64
    )
