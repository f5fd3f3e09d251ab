"""A sweep as a picture: speed-ups over one GPU, a colour per config, written by hand so that no plotting is needed."""

from __future__ import annotations

import math
from html import escape
from itertools import groupby

from planner.analysis.sweep import Point, Quantity, Sweep
from planner.report.tables.sweep import value_text

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 230, 56, 64
# Okabe & Ito 2008: told apart by the colour-blind too; then others. More configs than colours begin again.
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
COLOURS = (*OKABE_ITO, "#882255", "#999933", "#332288", "#aa4499", "#44aa99", "#661100", "#6699cc", "#888888")
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_NONE = "none fits"
_NAMES: dict[Quantity, str] = {"gpus": "number of GPUs", "bandwidth": "bandwidth", "memory": "memory per GPU"}


def sweep_svg(sweep: Sweep) -> str:
    """An SVG document: the quantity along the bottom (logarithmic for rates and sizes), the speed-up upwards."""
    axes = _Axes(sweep)
    points = sorted((*sweep.points, *(change.above for change in sweep.changes)), key=lambda point: point.value)
    configs = list(dict.fromkeys(point.config or _NONE for point in points))
    colour = {config: COLOURS[number % len(COLOURS)] for number, config in enumerate(configs)}
    colour[_NONE] = "#999999"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 28, f"{sweep.model}: the fastest plan by {_NAMES[sweep.quantity]}", size=17, weight="bold"),
        *axes.frame(),
        *_changes(sweep, axes),
        *_curve("data parallel", [(point, _data_parallel(point)) for point in points], axes, "#777777"),
        *_lines(sweep.quantity, points, axes, colour),
        *_legend(configs, colour),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Axes:
    """Places of values on the page."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        values = [point.value for point in sweep.points]
        self.low, self.high = min(values), max(values)
        speeds = [point.speedup_over_one_gpu or 0.0 for point in sweep.points]
        self.step = _round_step(max([*speeds, 1.0]) / 5)
        self.top = self.step * math.ceil(max([*speeds, 1.0]) / self.step)

    def x(self, value: float) -> float:
        span = WIDTH - LEFT - RIGHT
        if self.low == self.high:
            return LEFT + span / 2
        if self.sweep.quantity == "gpus":
            return LEFT + span * (value - self.low) / (self.high - self.low)
        return LEFT + span * math.log(value / self.low) / math.log(self.high / self.low)

    def y(self, speed: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * speed / self.top

    def frame(self) -> list[str]:
        """Grid lines, ticks and the axes' names."""
        parts = []
        for number in range(round(self.top / self.step) + 1):
            y = self.y(number * self.step)
            parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#dddddd"))
            parts.append(_text(LEFT - 8, y + 4, f"{number * self.step:g}x", anchor="end"))
        for value in _ticks(self.low, self.high, self.sweep.quantity):
            x, bottom = self.x(value), HEIGHT - BOTTOM
            parts.append(_line(x, bottom, x, bottom + 5, "#333333"))
            label = f"{value:.0f}" if self.sweep.quantity == "gpus" else value_text(value, self.sweep.quantity)
            parts.append(_text(x, bottom + 20, label, anchor="middle"))
        parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#333333"))
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(_text(middle, HEIGHT - 18, _NAMES[self.sweep.quantity], anchor="middle"))
        parts.append(_text(LEFT, TOP - 10, "speed-up over one GPU"))
        return parts


def _lines(quantity: Quantity, points: list[Point], axes: _Axes, colour: dict[str, str]) -> list[str]:
    """The plans' speed-ups: a line through all, and a dot per point in the colour of its config."""
    parts = _curve("", [(point, point.speedup_over_one_gpu) for point in points], axes, "#333333")
    for point in points:
        x, y = axes.x(point.value), axes.y(point.speedup_over_one_gpu or 0.0)
        config = point.config or _NONE
        title = escape(f"{value_text(point.value, quantity)}: {config}")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour[config]}"><title>{title}</title></circle>')
    return parts


def _curve(name: str, values: list[tuple[Point, float | None]], axes: _Axes, stroke: str) -> list[str]:
    """A line through the values, broken where there are none."""
    parts = []
    dash = ' stroke-dasharray="6 4"' if name else ""
    for known, run in groupby(values, key=lambda pair: pair[1] is not None):
        places = [(axes.x(point.value), axes.y(speed)) for point, speed in run if speed is not None]
        if known and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.5"{dash}/>')
    return parts


def _changes(sweep: Sweep, axes: _Axes) -> list[str]:
    """A faint line where the config changes."""
    places = [axes.x(math.sqrt(change.below * change.above.value)) for change in sweep.changes]
    return [_line(x, TOP, x, HEIGHT - BOTTOM, "#bbbbbb", dash="2 3") for x in places]


def _legend(configs: list[str], colour: dict[str, str]) -> list[str]:
    x, parts = WIDTH - RIGHT + 24, []
    for number, config in enumerate(configs):
        y = TOP + 12 + 22 * number
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour[config]}"/>')
        parts.append(_text(x + 14, y, config if len(config) <= 26 else config[:24] + "…"))
    y = TOP + 22 + 22 * len(configs)
    parts.append(_line(x - 7, y - 4, x + 7, y - 4, "#777777", dash="6 4"))
    parts.append(_text(x + 14, y, "data parallel"))
    parts.append(_line(x, y + 10, x, y + 26, "#bbbbbb", dash="2 3"))
    parts.append(_text(x + 14, y + 22, "the config changes"))
    return parts


def _data_parallel(point: Point) -> float | None:
    if point.speedup_over_one_gpu is None or not point.speedup_over_data_parallel:
        return None
    return point.speedup_over_one_gpu / point.speedup_over_data_parallel


def _ticks(low: float, high: float, quantity: Quantity) -> list[float]:
    """Round numbers between the ends: 1, 2 and 5 times powers of ten, or multiples of a round step."""
    if low == high:
        return [low]
    if quantity == "gpus":
        step = max(1, round(_round_step((high - low) / 8)))
        return sorted({low, *(float(n) for n in range(int(-(-low // step)) * step, int(high) + 1, step))})
    unit = 1 / 8 if quantity == "bandwidth" else 1.0  # rates are read in bits per second
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    found = [factor * 10.0**exponent * unit for exponent in exponents for factor in factors]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)] or [low, high]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no less."""
    scale = 10.0 ** math.floor(math.log10(least))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= least * (1 - 1e-9))


def _text(x: float, y: float, text: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    style = f'{_FONT} font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="#222222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}/>'
