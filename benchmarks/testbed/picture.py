"""Draw predicted against measured times as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.testbed.measure import Measured

SIZE, MARGIN = 520, 60
BAND = 0.08  # error that no run should exceed
_STYLE = """\
<style>
text { font: 13px system-ui, sans-serif; fill: #222 } .axis { stroke: #888 } .band { fill: #4477aa; fill-opacity: 0.13 }
.even { stroke: #4477aa; stroke-dasharray: 4 3 } .asynchronous { fill: #4477aa } .synchronous { fill: #cc6677 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .band { fill: #88bbee; fill-opacity: 0.2 } }
</style>"""


def scatter_svg(runs: Sequence[Measured]) -> str:
    """Return seconds per minibatch on logarithmic axes: equal on the dashed line, within 8% in the
    band.
    """
    times = [t for run in runs for t in (run.predicted_s, run.measured_s)]
    low, high = math.log(min(times) * 0.8), math.log(max(times) * 1.25)
    inner = SIZE - 2 * MARGIN

    def x(seconds: float) -> float:
        return MARGIN + inner * (math.log(seconds) - low) / (high - low)

    def y(seconds: float) -> float:
        return SIZE - x(seconds)

    def corner(seconds: float, factor: float) -> str:
        return f"{x(seconds):.1f},{y(seconds * factor):.1f}"

    first, last = math.exp(low), math.exp(high)
    band = (
        corner(first, 1 + BAND),
        corner(last, 1 + BAND),
        corner(last, 1 - BAND),
        corner(first, 1 - BAND),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" role="img" '
        'aria-label="Predicted against measured seconds per minibatch">',
        _STYLE,
        f'<polygon class="band" points="{" ".join(band)}"/>',
        f'<line class="even" x1="{x(first):.1f}" y1="{y(first):.1f}" x2="{x(last):.1f}" '
        f'y2="{y(last):.1f}"/>',
        f'<path class="axis" fill="none" d="M{MARGIN} {MARGIN}V{SIZE - MARGIN}H{SIZE - MARGIN}"/>',
    ]
    for tick in _ticks(first, last):
        parts.append(
            f'<text x="{x(tick):.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{tick:g}</text>'
        )
        parts.append(
            f'<text x="{MARGIN - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    parts.append(
        f'<text x="{SIZE / 2}" y="{SIZE - 16}" text-anchor="middle">predicted, s per '
        f"minibatch</text>"
    )
    parts.append(
        f'<text x="16" y="{SIZE / 2}" text-anchor="middle" transform="rotate(-90 16 {SIZE / 2})">'
        "measured, s per minibatch</text>"
    )
    for run in runs:
        kind = "asynchronous" if run.schedule in ("1f1b", "2bw") else "synchronous"
        title = f"{run.model}, {run.config} {run.schedule}, {run.cluster}: {run.error:+.1%}"
        parts.append(
            f'<circle class="{kind}" cx="{x(run.predicted_s):.1f}" cy="{y(run.measured_s):.1f}" '
            f'r="5">'
            f"<title>{title}</title></circle>"
        )
    for row, kind in enumerate(("asynchronous", "synchronous")):
        height = MARGIN + 14 + 20 * row
        parts.append(f'<circle class="{kind}" cx="{MARGIN + 18}" cy="{height - 4}" r="5"/>')
        parts.append(f'<text x="{MARGIN + 30}" y="{height}">{kind}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    steps = [step * 10.0**power for power in range(-4, 4) for step in (1, 2, 5)]
    return [step for step in steps if low <= step <= high]
