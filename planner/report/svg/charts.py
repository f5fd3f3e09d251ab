"""Draw the charts of a profile (a bar per layer) and of a sweep (the speed of the plans by one quantity)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from planner.analysis.sweep import Quantity, Sweep, SweepPoint
from planner.formats.plan_parts import short_config
from planner.formats.profile import Layer, Profile
from planner.formats.timeline import EventKind
from planner.report.svg.shapes import Font, box, document, line, round_step, text
from planner.report.tables.compare import NONE_FITS, value_text
from planner.report.tables.profile import output_bytes, time_s
from planner.report.timeline import COLOURS
from planner.units import format_bytes, format_rate, format_seconds

_CHART_WIDTH, _CHART_HEIGHT, _MARGIN, _TOP, _GAP = 960, 130, 90, 40, 46
_PARTS: tuple[EventKind, ...] = ("forward", "backward", "update")
_BYTES = "#6b7785"  # no kind of event has this colour
_LABEL = Font(12, "end")


@dataclass(frozen=True)
class _Chart:
    """One quantity of all layers; a bar has a value per colour, one on top of the other."""

    name: str
    bars: Sequence[Sequence[float]]
    colours: Sequence[str]
    written: Callable[[float], str]


def profile_svg(profile: Profile) -> str:
    """Draw three charts below each other; pointing at a bar shows its layer's name and numbers."""
    layers = profile.layers
    times = [[layer.forward_s, layer.backward_s, layer.update_s] for layer in layers]
    charts = (
        _Chart("time", times, [COLOURS[kind] for kind in _PARTS], format_seconds),
        _Chart("weights", [[layer.weight_bytes] for layer in layers], [_BYTES], format_bytes),
        _Chart("output", [[output_bytes(layer)] for layer in layers], [_BYTES], format_bytes),
    )
    samples = f", {profile.microbatch_size} samples" if profile.microbatch_size is not None else ""
    title = f"{profile.model} on {profile.device.name}{samples}, {profile.provenance.source}"
    parts = [text(_MARGIN, 16, title, Font(14))]
    parts += [text(_MARGIN + 120 * i, 34, f"■ {kind}", Font(12, fill=COLOURS[kind])) for i, kind in enumerate(_PARTS)]
    for number, chart in enumerate(charts):
        parts += _chart(chart, layers, _TOP + number * (_CHART_HEIGHT + _GAP) + 10)
    return document(_MARGIN + _CHART_WIDTH + 20, _TOP + len(charts) * (_CHART_HEIGHT + _GAP), parts)


def _chart(chart: _Chart, layers: Sequence[Layer], top: float) -> Iterator[str]:
    bottom = top + _CHART_HEIGHT
    most = max(map(sum, chart.bars)) or 1.0
    step = _CHART_WIDTH / len(layers)
    yield text(_MARGIN - 8, top + 10, chart.written(most), _LABEL)
    yield text(_MARGIN - 8, bottom, chart.name, _LABEL)
    yield line((_MARGIN, bottom), (_MARGIN + _CHART_WIDTH, bottom), "#000000")
    for number, (layer, values) in enumerate(zip(layers, chart.bars, strict=True)):
        if not sum(values):
            continue
        base = bottom
        yield f"<g><title>{escape(_layer_title(layer))}</title>"
        for value, colour in zip(values, chart.colours, strict=True):
            height = _CHART_HEIGHT * value / most
            base -= height
            yield box((_MARGIN + number * step, base), (max(0.5, step * 0.9), height), colour)
        yield "</g>"


def _layer_title(layer: Layer) -> str:
    return (
        f"{layer.name} ({layer.op}): {format_seconds(time_s(layer))}, weights {format_bytes(layer.weight_bytes)}, "
        f"output {format_bytes(output_bytes(layer))}"
    )


WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 230, 56, 64
LEGEND_LENGTH = 26  # characters of a config
_NAMES: dict[Quantity, str] = {"gpus": "number of GPUs", "bandwidth": "bandwidth", "memory": "memory per GPU"}
_DOT = "#4a5563"
_CENTRED = Font(anchor="middle")
_CHANGE_DASH = "2 3"
_DATA_PARALLEL = 'stroke="#777777" stroke-dasharray="6 4"'


def sweep_svg(sweep: Sweep) -> str:
    """Draw the quantity along the bottom (logarithmic for rates and sizes) and the speed upwards."""
    axes = _Axes(sweep)
    # Where the time was over, a change is as far as a point of the sweep.
    found = {point.value: point for point in (*sweep.points, *(change.above for change in sweep.changes))}
    points = [found[value] for value in sorted(found)]
    configs = list(dict.fromkeys(point.config or NONE_FITS for point in points))
    names = {config: "×" if config == NONE_FITS else str(number) for number, config in enumerate(configs, 1)}
    parts = [
        text(LEFT, 28, f"{sweep.model}: the fastest plan by {_NAMES[sweep.quantity]}", Font(17, weight="bold")),
        *axes.frame(),
        *_changes(sweep, axes),
        *_curve([(point, _data_parallel(point)) for point in points], axes, _DATA_PARALLEL),
        *_lines(sweep.quantity, points, axes, names),
        *_legend(names),
    ]
    return document(WIDTH, HEIGHT, parts)


class _Axes:
    """Where values are on the page."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        values = [point.value for point in sweep.points]
        self.low, self.high = min(values), max(values)
        most = max(point.rate_per_s for point in sweep.points) or 1.0
        self.step = round_step(most / 5)
        self.top = self.step * math.ceil(most / self.step)

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
        """Draw grid lines, ticks and the axes' names."""
        parts, bottom = [], HEIGHT - BOTTOM
        for number in range(round(self.top / self.step) + 1):
            y = self.y(number * self.step)
            parts.append(line((LEFT, y), (WIDTH - RIGHT, y), "#dddddd"))
            parts.append(text(LEFT - 8, y + 4, format_rate(number * self.step), Font(anchor="end")))
        for value in _ticks(self.low, self.high, self.sweep.quantity):
            x = self.x(value)
            parts.append(line((x, bottom), (x, bottom + 5), "#333333"))
            label = f"{value:.0f}" if self.sweep.quantity == "gpus" else value_text(value, self.sweep.quantity)
            parts.append(text(x, bottom + 20, label, _CENTRED))
        parts.append(line((LEFT, bottom), (WIDTH - RIGHT, bottom), "#333333"))
        parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, _NAMES[self.sweep.quantity], _CENTRED))
        parts.append(text(LEFT, TOP - 10, self.sweep.rate_unit))
        return parts


def _lines(quantity: Quantity, points: list[SweepPoint], axes: _Axes, names: dict[str, str]) -> list[str]:
    """Draw the plans' speeds: a line through all, a dot per point, and where the config is new its number."""
    parts = _curve([(point, point.rate_per_s if point.config else None) for point in points], axes, 'stroke="#333333"')
    configs = [point.config or NONE_FITS for point in points]
    for point, config, before in zip(points, configs, ["", *configs], strict=False):
        title = f"{value_text(point.value, quantity)}: {config}"
        parts.append(_dot(axes.x(point.value), axes.y(point.rate_per_s), names[config] * (config != before), title))
    return parts


def _dot(x: float, y: float, name: str, title: str = "") -> str:
    """Draw a dot, with a name in it or a small one."""
    shown = f"<title>{escape(title)}</title>" if title else ""
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{9 if name else 4}" fill="{_DOT}">{shown}</circle>'
    return circle + (text(x, y + 4, name, Font(11, "middle", "#ffffff")) if name else "")


def _curve(values: list[tuple[SweepPoint, float | None]], axes: _Axes, stroke: str) -> list[str]:
    """Draw a line through the values, broken where there are none."""
    parts = []
    for known, run in groupby(values, key=lambda pair: pair[1] is not None):
        places = [(axes.x(point.value), axes.y(speed)) for point, speed in run if speed is not None]
        if known and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" {stroke} stroke-width="1.5"/>')
    return parts


def _changes(sweep: Sweep, axes: _Axes) -> list[str]:
    """Draw a faint line where the config changes."""
    places = [axes.x(math.sqrt(change.below * change.above.value)) for change in sweep.changes]
    return [line((x, TOP), (x, HEIGHT - BOTTOM), "#bbbbbb", _CHANGE_DASH) for x in places]


def _legend(names: dict[str, str]) -> list[str]:
    x, parts = WIDTH - RIGHT + 24, []
    for number, (config, name) in enumerate(names.items()):
        y = TOP + 12 + 22 * number
        parts += [_dot(x, y - 4, name), text(x + 14, y, short_config(config, LEGEND_LENGTH))]
    y = TOP + 22 + 22 * len(names)
    return [
        *parts,
        line((x - 7, y - 4), (x + 7, y - 4), "#777777", "6 4"),
        text(x + 14, y, "data parallel"),
        line((x, y + 10), (x, y + 26), "#bbbbbb", _CHANGE_DASH),
        text(x + 14, y + 22, "the config changes"),
    ]


def _data_parallel(point: SweepPoint) -> float | None:
    if not point.speedup_over_data_parallel or point.data_parallel_over_memory_bytes:
        return None
    return point.rate_per_s / point.speedup_over_data_parallel


def _ticks(low: float, high: float, quantity: Quantity) -> list[float]:
    """Choose round numbers between the ends: 1, 2 and 5 times powers of ten, or multiples of a round step."""
    if low == high:
        return [low]
    if quantity == "gpus":
        step = max(1, round(round_step((high - low) / 8)))
        return sorted({low, *(float(n) for n in range(int(-(-low // step)) * step, int(high) + 1, step))})
    unit = 1 / 8 if quantity == "bandwidth" else 1.0  # rates are read in bits per second
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    found = [factor * 10.0**exponent * unit for exponent in exponents for factor in factors]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)] or [low, high]
