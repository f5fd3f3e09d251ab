"""Calibrate a device on measured rows, and judge it by others.

Both are of one source, for a card's clocks are those of whoever measured.
The fit (`fit_device`) is one factor of all shares of the arithmetic and one of all shares of the
bandwidth, for each device. For the fit alone a row's time is taken to be a power of each factor,
from two more predictions; calibrated predictions are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.gpu_truth.fit_device import Timed, fit_times, scaled
from benchmarks.gpu_truth.rows import Row
from planner.profiler.estimated.devices import DeviceSpec

_FACTOR = 1.15  # of the predictions that tell the powers


def calibrated(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their times after calibration on the others of their source and
    device.
    """
    timed = {number: _timed(row) for number, row in enumerate(rows) if row.predict is not None}
    result = []
    for number, row in enumerate(rows):
        others = [
            other
            for other in timed
            if other != number and (rows[other].source, rows[other].spec) == (row.source, row.spec)
        ]
        by_row = _fitted(row, by_job([(rows[other], timed[other]) for other in others]))
        of_others = [(rows[other], timed[other]) for other in others if rows[other].job != row.job]
        result.append(replace(row, calibrated_s=by_row, by_job_s=_fitted(row, by_job(of_others))))
    return result


def by_job(rows: Sequence[tuple[Row, Timed]]) -> list[list[Timed]]:
    """Return the measurements of each job, which are left out together."""
    groups: dict[str, list[Timed]] = {}
    for row, timed in rows:
        groups.setdefault(row.job, []).append(timed)
    return list(groups.values())


def factors(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the factors of arithmetic and bandwidth that all rows of one source and device fit."""
    start = next(row.spec for row in rows if row.spec is not None)
    spec = fit_times(start, by_job([(row, _timed(row)) for row in rows if row.predict is not None]))
    return (1.0, 1.0) if spec is None else _factors(start, spec)


def _factors(start: DeviceSpec, spec: DeviceSpec) -> tuple[float, float]:
    arithmetic = spec.achieved_arithmetic["gemm"] / start.achieved_arithmetic["gemm"]
    return arithmetic, spec.achieved_bandwidth["gemm"] / start.achieved_bandwidth["gemm"]


def _fitted(row: Row, groups: Sequence[Sequence[Timed]]) -> float | None:
    if row.predict is None or row.predicted is None or row.spec is None or not groups:
        return None
    spec = fit_times(row.spec, groups)  # which declines what does not help
    return row.predicted.seconds if spec is None else row.predict(spec).seconds


def _timed(row: Row) -> Timed:
    assert row.predict is not None
    assert row.spec is not None
    assert row.predicted is not None
    start_s = row.predicted.seconds
    by_arithmetic, by_bandwidth = (
        math.log(row.predict(scaled(row.spec, *factors)).seconds / start_s) / math.log(_FACTOR)
        for factors in ((_FACTOR, 1.0), (1.0, _FACTOR))
    )
    return Timed(row.measured_s, partial(_power, row.spec, start_s, by_arithmetic, by_bandwidth))


def _power(
    start: DeviceSpec, start_s: float, by_arithmetic: float, by_bandwidth: float, spec: DeviceSpec
) -> float:
    arithmetic, bandwidth = _factors(start, spec)
    return float(start_s * arithmetic**by_arithmetic * bandwidth**by_bandwidth)
