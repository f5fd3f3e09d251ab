"""Fit a device to what was measured on it: profiles, or whole steps whose times are known.

Profiles determine the shares of the peaks that each class of kernels achieves. Few sums of steps,
such as those that a log says, cannot tell the classes apart. So they determine two factors: one of
all shares of the arithmetic, and one of all shares of the bandwidth (clocks that fall under load,
caches). With measured sums t of estimates e(x), where x are the logarithms of the factors, the fit
minimises

    sum((log(e(x) / t) / 0.05)²) + sum((x / 0.16)²)

that is: a step's estimate is right to 5% once the factors are, and the table's shares are right to
16%.

Such a fit is used only where it has been seen to help with what it was not fitted to. Every group
of steps, such as those of one model, is left out in turn, and its error with a fit to the others is
compared with the table's. The mean gain must exceed three of its standard errors, over three groups
or more: a smaller one, of few steps, is chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from planner.formats.profile import Profile
from planner.profiler.estimated.devices import COMPUTE_CLASSES, OP_CLASSES, DeviceSpec
from planner.profiler.estimated.trace import StepTrace

Floats = NDArray[np.float64]

_STEP_ERROR = 0.05  # of an estimate with the right factors
_SHARE_ERROR = 0.16  # of the table's shares
# that say whether a fit helps, and standard errors of the gain
_LEAST_GROUPS, _LEAST_ERRORS = 3, 3.0
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


@dataclass(frozen=True)
class Timed:
    """A sum that was measured, and its estimate for a device."""

    measured_s: float
    estimated_s: Callable[[DeviceSpec], float]


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
