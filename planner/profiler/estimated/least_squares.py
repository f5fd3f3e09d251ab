"""Minimise a sum of squares whose derivatives are numerical: Levenberg-Marquardt (Marquardt 1963)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_ITERATIONS = 60
_STEP = 1e-4  # for the derivatives


def least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Return a local minimum of the sum of squares, starting from `start`."""
    best, error = start, residuals(start)
    damping = 1e-2
    for _ in range(_ITERATIONS):
        slopes = np.stack([(residuals(best + _STEP * unit) - error) / _STEP for unit in np.eye(len(best))], axis=1)
        normal = slopes.T @ slopes
        while damping < 1e8:
            # Without the small constant, an unknown that no time depends on would make the matrix singular.
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -slopes.T @ error)
            # The clip keeps a trial step within a factor e of the shares, where the slopes still hold.
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
