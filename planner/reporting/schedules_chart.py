"""Draw a comparison of schedules: samples per second over the global batch, a curve for each."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.errors import InputError
from planner.reporting.svg import (
    CURVES,
    Font,
    Picture,
    Point,
    document,
    line,
    marker,
    polyline,
    round_ticks,
    text,
)
from planner.solver.each_schedule import ScheduleComparison, ScheduleRow
from planner.units import format_rate

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 150, 40, 56
_GROUND, _INK = "#dddddd", "#222222"
_TICKS = 6  # about so many beside the vertical axis

Curves = Mapping[str, Sequence[Point]]  # by schedule: global batch, and rate


class _Axes(NamedTuple):
    """Where numbers are drawn: batches in steps of factors, rates from zero on."""

    least: float
    most: float
    most_rate: float

    def at(self, point: Point) -> Point:
        """Return the place of a global batch and a rate, in pixels."""
        batch, rate = point
        width = _WIDTH - _LEFT - _RIGHT
        height = _HEIGHT - _TOP - _BOTTOM
        share = 0.5
        if self.most > self.least:
            share = math.log(batch / self.least) / math.log(self.most / self.least)
        return _LEFT + share * width, _HEIGHT - _BOTTOM - rate / self.most_rate * height


def plot(comparison: ScheduleComparison) -> Picture:
    """Return the picture of a comparison.

    Raises:
        InputError: where no schedule has a plan.
    """
    planned = [row for row in comparison.rows if row.obstacle is None]
    if not planned:
        raise InputError(
            "no schedule has a plan that could be drawn",
            hint="print the comparison: it says why each has none",
        )

    curves = _curves(planned)
    batches = sorted({batch for points in curves.values() for batch, _ in points})
    rates = [rate for points in curves.values() for _, rate in points]
    axes = _Axes(batches[0], batches[-1], 1.05 * max(rates))
    unit = "samples" if planned[0].global_batch is not None else "microbatches"
    parts = [
        text(_LEFT, _TOP - 16, f"{comparison.model}: {unit} per second", Font(14)),
        *_grid(axes, batches),
        text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, f"global batch, {unit}", _CENTRED),
        *_drawn(curves, axes),
    ]
    return Picture(document(_WIDTH, _HEIGHT, parts))


def _curves(rows: Sequence[ScheduleRow]) -> Curves:
    curves = defaultdict[str, list[Point]](list)
    for row in rows:
        assert row.seconds_per_microbatch is not None
        rate = row.samples_per_s or 1 / row.seconds_per_microbatch
        curves[str(row.schedule)].append((float(row.global_batch or row.microbatches), rate))
    return {name: sorted(points) for name, points in curves.items()}


_CENTRED = Font(12, "middle")


def _grid(axes: _Axes, batches: Sequence[float]) -> Iterator[str]:
    for rate in round_ticks(0.0, axes.most_rate, axes.most_rate / _TICKS):
        _, y = axes.at((axes.least, rate))
        yield line((_LEFT, y), (_WIDTH - _RIGHT, y), _GROUND)
        yield text(_LEFT - 8, y + 4, format_rate(rate), Font(12, "end"))
    for batch in batches:
        x, bottom = axes.at((batch, 0.0))
        yield line((x, bottom), (x, bottom + 5), _INK)
        yield text(x, bottom + 20, f"{batch:g}", _CENTRED)


def _drawn(curves: Curves, axes: _Axes) -> Iterator[str]:
    """Draw the curves, and their names beside them from the fastest on."""
    ordered = sorted(curves, key=lambda name: -curves[name][-1][1])
    for number, name in enumerate(ordered):
        colour = CURVES[number % len(CURVES)]
        places = [axes.at(point) for point in curves[name]]
        yield polyline(places, colour)
        yield from (marker(place, colour) for place in places)

        y = _TOP + 12 + 20 * number
        yield marker((_WIDTH - _RIGHT + 18, y - 4), colour)
        yield text(_WIDTH - _RIGHT + 28, y, name, Font(13))
