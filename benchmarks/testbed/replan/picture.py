"""Draw the throughput of runs over time, with and without moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from planner.reporting.svg import CURVES, Font, box, document, line, polyline, round_ticks, text

if TYPE_CHECKING:
    from benchmarks.testbed.replan.real import Row

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 48
STEP_S = 1.0  # of the curve
SHADE = "#f2e6d8"


def throughput(row: Row) -> list[tuple[float, float]]:
    """Return (second, samples per second): between the updates next to each two whole steps."""
    found = []
    first = math.ceil(row.updates[0] / STEP_S)
    for number in range(first, math.floor(row.updates[-1] / STEP_S)):
        start_s = number * STEP_S
        count = sum(start_s <= at < start_s + STEP_S for at in row.updates)
        found.append((start_s + STEP_S / 2, count * row.minibatch_size / STEP_S))
    return found


def smooth(points: list[tuple[float, float]], beside: int = 1) -> list[tuple[float, float]]:
    """Return the mean of each point and so many on both sides: a second has few minibatches."""
    return [
        (at, sum(rate for _, rate in near) / len(near))
        for number, (at, _) in enumerate(points)
        for near in [points[max(0, number - beside) : number + beside + 1]]
    ]


def throughput_svg(rows: Iterable[Row], during_s: float) -> str:
    """Return the picture: a curve for each run, the disturbance shaded, each move marked."""
    rows = list(rows)
    curves = {row.replan: smooth(throughput(row)) for row in rows}
    points = [point for curve in curves.values() for point in curve]
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    top = 1.1 * max(rate for _, rate in points)

    def place(at: float, rate: float) -> tuple[float, float]:
        along = (at - first) / (last - first)
        up = rate / top
        x = LEFT + (WIDTH - LEFT - RIGHT) * along
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up

    x0, _ = place(0.0, 0.0)
    x1, _ = place(during_s, 0.0)
    parts = [
        box((x0, TOP), (x1 - x0, HEIGHT - TOP - BOTTOM), SHADE),
        text(
            LEFT,
            26,
            "Samples per second of two emulated devices, "
            "of which one is 2.5 times slower for a while",
        ),
        text(x0 + 6, TOP + 16, "one device is slower", Font(12)),
        text(WIDTH - RIGHT, HEIGHT - 10, "seconds", Font(12, "end")),
    ]
    for rate in round_ticks(0.0, top, top / 6):
        _, y = place(first, rate)
        parts.append(line((LEFT, y), (WIDTH - RIGHT, y), "#dddddd"))
        parts.append(text(LEFT - 8, y + 4, f"{rate:.0f}", Font(12, "end")))
    for second in range(math.ceil(first / 10) * 10, math.floor(last) + 1, 10):
        x, _ = place(second, 0.0)
        parts.append(text(x, HEIGHT - BOTTOM + 18, str(second), Font(12, "middle")))
    for row in rows:
        colour = CURVES[2] if row.replan else CURVES[1]
        parts.append(polyline((place(*point) for point in curves[row.replan]), colour))
        x = WIDTH - RIGHT - (240 if row.replan else 110)
        words = "with --replan" if row.replan else "without"
        parts.append(line((x, 40), (x + 22, 40), colour))
        parts.append(text(x + 28, 44, words, Font(12)))
        for at in row.moved_at:
            x, y = place(at, 0.0)
            parts.append(line((x, y), (x, TOP), colour, "4 4"))
            parts.append(text(x + 4, y - 6, "moves", Font(12, fill=colour)))
    return document(WIDTH, HEIGHT, parts)
