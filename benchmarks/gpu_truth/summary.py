"""What the rows of a source say together: errors, order, and what choosing by the
prediction costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from benchmarks.gpu_truth.rows import Row
from planner.reporting.svg import CURVES, Font, document, line, text

_SIZE, _MARGIN, _LEGEND = 520, 60, 150


@dataclass(frozen=True)
class Summary:
    """The predicted rows of one source.

    Attributes:
        rows: all; those without a prediction are only counted.
        mean_error, median_error: mean and median absolute relative error.
        calibrated, by_job: mean absolute relative error after calibration on a device's other rows,
        or jobs. bias: mean relative error. tau: Kendall's rank correlation over the pairs of rows
        of the same job; None without such pairs. memory_error, worst_memory: mean absolute relative
        error of stages' peaks, and the largest; None without any. regret: mean over jobs with
        several rows of how much slower the row is that has the least prediction than the
            one that was measured fastest; None without such jobs. worst_regret: of the worst job.
    """

    rows: Sequence[Row]
    mean_error: float | None
    median_error: float | None
    calibrated: float | None
    by_job: float | None
    bias: float | None
    tau: float | None
    regret: float | None
    worst_regret: float | None
    memory_error: float | None
    worst_memory: float | None


def summary(rows: Sequence[Row]) -> Summary:
    """Summarise the rows of one source."""
    errors = [row.error for row in rows if row.error is not None]
    jobs = list(_jobs(rows))
    pairs = [pair for job in jobs for pair in combinations(job, 2)]
    signs = [math.copysign(1, (a.measured_s - b.measured_s) * (_s(a) - _s(b))) for a, b in pairs]
    regrets = [min(job, key=_s).measured_s / min(row.measured_s for row in job) - 1 for job in jobs]
    memory = [abs(predicted / measured - 1) for row in rows for predicted, measured in row.memory]
    return Summary(
        rows,
        mean_error=_mean([abs(error) for error in errors]),
        median_error=median(abs(error) for error in errors) if errors else None,
        calibrated=_mean_error(rows, [row.calibrated_s for row in rows]),
        by_job=_mean_error(rows, [row.by_job_s for row in rows]),
        bias=_mean(errors),
        tau=_mean(signs),
        regret=_mean(regrets),
        worst_regret=max(regrets, default=None),
        memory_error=_mean(memory),
        worst_memory=max(memory, default=None),
    )


def error_of(row: Row, seconds: float | None) -> float | None:
    """Return the relative error of another prediction of the row."""
    return None if seconds is None else seconds / row.measured_s - 1


def _mean_error(rows: Sequence[Row], seconds: Sequence[float | None]) -> float | None:
    errors = [error_of(row, each) for row, each in zip(rows, seconds, strict=True)]
    return _mean([abs(error) for error in errors if error is not None])


def _jobs(rows: Sequence[Row]) -> Iterable[list[Row]]:
    for name in dict.fromkeys(row.job for row in rows):
        job = [row for row in rows if row.job == name and row.predicted is not None]
        if len(job) > 1:
            yield job


def _s(row: Row) -> float:
    assert row.predicted is not None
    return row.predicted.seconds


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def scatter_svg(rows: Sequence[Row]) -> str:
    """Draw predicted against measured seconds, both logarithmic; the diagonal is a perfect
    prediction.
    """
    shown = [row for row in rows if row.predicted is not None]
    times = [time for row in shown for time in (row.measured_s, _s(row))]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def at(seconds: float) -> float:
        return (math.log10(seconds) - low) / (high - low) * (_SIZE - 2 * _MARGIN)

    colours = dict(zip(dict.fromkeys(row.source for row in shown), CURVES, strict=False))
    end = _SIZE - _MARGIN
    small = Font(11, anchor="middle")
    parts = [line((_MARGIN, end), (end, _MARGIN), "#999999")]
    for power in range(low, high + 1):
        place, label = at(10.0**power), f"{10.0**power:g} s"
        parts += [
            line((_MARGIN + place, _MARGIN), (_MARGIN + place, end), "#eeeeee"),
            line((_MARGIN, end - place), (end, end - place), "#eeeeee"),
            text(_MARGIN + place, end + 16, label, small),
            text(_MARGIN - 6, end - place + 4, label, Font(11, anchor="end")),
        ]
    for row in shown:
        x, y = _MARGIN + at(row.measured_s), end - at(_s(row))
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours[row.source]}" '
            f'fill-opacity="0.7"/>'
        )
    for number, (source, colour) in enumerate(colours.items()):
        parts.append(
            text(_SIZE - 10, _MARGIN + 18 * number, source, Font(12, fill=colour, weight="bold"))
        )
    parts.append(text(_SIZE / 2, _SIZE - 12, "measured", Font(13, anchor="middle")))
    parts.append(text(_MARGIN, _MARGIN - 16, "predicted", Font(13)))
    return document(_SIZE + _LEGEND, _SIZE, parts)
