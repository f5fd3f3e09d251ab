"""Fit a device to whole training steps whose times are known, such as those that a log says.

Few sums cannot tell the kernels' classes apart. So they determine two factors: one of all shares of the arithmetic,
and one of all shares of the bandwidth (clocks that fall under load, caches). With measured sums t of estimates e(x),
where x are the logarithms of the factors, the fit minimises

    sum((log(e(x) / t) / 0.05)²) + sum((x / 0.16)²)

that is: a step's estimate is right to 5% once the factors are, and the table's shares are right to 16%.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from planner.errors import InputError
from planner.formats.files import Record, load_record
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.estimated.devices import DeviceSpec, DType
from planner.profiler.estimated.execution import Execution, Fusion
from planner.profiler.estimated.least_squares import Floats, least_squares
from planner.profiler.estimated.trace import StepTrace, trace_step

_REMEDY = "see `KnownStep` in planner/profiler/estimated/known_steps.py for its fields"
_STEP_ERROR = 0.05  # of an estimate with the right factors
_SHARE_ERROR = 0.16  # of the table's shares
_Seconds = Annotated[float, Field(gt=0)]


class KnownStep(Record):
    """A training step on one device, and how long it took: the whole, or some of its parts."""

    model: str  # model file, relative to this file
    batch_size: Annotated[int, Field(ge=1)]
    dtype: DType = "float32"
    fusion: Fusion | None = None
    master_weights: bool = False
    step_s: _Seconds | None = None  # forward, backward and update
    forward_s: _Seconds | None = None
    backward_s: _Seconds | None = None
    update_s: _Seconds | None = None

    @model_validator(mode="after")
    def _check_times(self) -> KnownStep:
        if not self.times:
            raise ValueError("a step has none of step_s, forward_s, backward_s and update_s")
        return self

    @property
    def times(self) -> dict[tuple[int, ...], float]:
        """The known sums, by which of forward, backward and update they contain."""
        parts = {(0, 1, 2): self.step_s, (0,): self.forward_s, (1,): self.backward_s, (2,): self.update_s}
        return {part: seconds for part, seconds in parts.items() if seconds is not None}


class KnownSteps(Record):
    """Steps on one type of device.

    {"schema_version": 1,
     "steps": [{"model": "gpt.py", "batch_size": 4, "dtype": "float16", "fusion": "apex", "master_weights": true,
                "forward_s": 0.131, "backward_s": 0.274}]}
    """

    schema_version: Literal[1] = 1
    steps: Annotated[tuple[KnownStep, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Timed:
    """A sum that was measured, and its estimate for a device."""

    measured_s: float
    estimated_s: Callable[[DeviceSpec], float]


@dataclass(frozen=True)
class KnownTimes:
    """Steps with their model files."""

    steps: tuple[KnownStep, ...]
    training_specs: tuple[TrainingSpec, ...]

    @property
    def models(self) -> str:
        """Names of the models, for people."""
        return ", ".join(dict.fromkeys(spec.name for spec in self.training_specs))

    def timed(self, kind: Literal["cpu", "cuda"]) -> Iterator[Timed]:
        """Trace each step, and yield its sums; raise InputError for what is estimated only for GPUs."""
        for step, training_spec in zip(self.steps, self.training_specs, strict=True):
            if kind == "cpu" and (step.fusion is not None or step.master_weights):
                raise InputError(
                    f"the step of '{step.model}' ran on a GPU, and the estimate is for a CPU",
                    hint="leave out `fused` and `master_weights`, or name a GPU",
                )
            execution = Execution(kind, step.fusion, step.master_weights)
            trace = trace_step(training_spec, step.batch_size, step.dtype, execution=execution)
            for parts, seconds in step.times.items():
                yield Timed(seconds, partial(_sum, trace, parts))


def _sum(trace: StepTrace, parts: Iterable[int], spec: DeviceSpec) -> float:
    seconds = trace.layer_seconds(spec)
    return sum(sum(seconds[part]) for part in parts)


def holds_steps(path: Path | str) -> bool:
    """Return whether this is a file of steps, and not a profile."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever loads it says what is wrong
    return isinstance(content, dict) and "steps" in content


def load_steps(path: Path | str) -> KnownTimes:
    """Read steps and their model files; raise InputError, ModelFileError when a file cannot be used."""
    steps = load_record(KnownSteps, path, InputError, _REMEDY).steps
    return KnownTimes(steps, tuple(load_model_file(Path(path).parent / step.model) for step in steps))


def fit_times(spec: DeviceSpec, timed: Sequence[Timed]) -> DeviceSpec:
    """Return the device with both factors fitted."""
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
        achieved_arithmetic={name: arithmetic * share for name, share in spec.achieved_arithmetic.items()},
        achieved_bandwidth={name: bandwidth * share for name, share in spec.achieved_bandwidth.items()},
    )
