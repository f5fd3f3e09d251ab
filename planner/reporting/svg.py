"""Draw timelines, profiles and sweeps as SVG, written by hand so that drawing needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from planner.analysis.sweep import Sweep, SweepPoint
from planner.formats.plan_parts import short_config
from planner.formats.profile import Profile
from planner.formats.timeline import Event, EventKind, Lane, Timeline
from planner.reporting.tables.compare import NONE_FITS, value_text
from planner.reporting.tables.profile import output_bytes, time_s
from planner.reporting.timeline import COLOURS, TEXTS, colour_legend, rows_of, shown_workers
from planner.units import format_bytes, format_rate, format_seconds

Point = tuple[float, float]
# The first are from Okabe & Ito 2008, for the colour-blind. For curves of any kind.
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
CURVES = (*OKABE_ITO, "#882255", "#999933", "#332288", "#aa4499", "#44aa99", "#661100", "#6699cc", "#888888")


@dataclass(frozen=True)
class Font:
    """How a text is set."""

    size: int = 13
    anchor: str = "start"
    fill: str = "#222222"
    weight: str = "normal"


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Write a complete document on white ground."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height:.0f}">'
    return "\n".join([head, f'<rect {size} fill="white"/>', *parts, "</svg>\n"])


def text(x: float, y: float, content: str, font: Font | None = None) -> str:
    """Write a text at its baseline."""
    font = font or Font()
    style = (
        f'font-family="Helvetica, Arial, sans-serif" font-size="{font.size}" font-weight="{font.weight}" '
        f'text-anchor="{font.anchor}" fill="{font.fill}"'
    )
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def line(start: Point, end: Point, stroke: str, dash: str = "") -> str:
    """Draw a line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}/>'


def box(corner: Point, size: Point, fill: str, title: str = "") -> str:
    """Draw a rectangle from its upper left corner; browsers show the title when it is pointed at."""
    inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
    (x, y), (width, height) = corner, size
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{inner}'


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb" (WCAG 2): 0 for black, 1 for white."""
    parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(ground: str) -> str:
    """Return white or black, whichever is easier to read on a colour."""
    return "#ffffff" if luminance(ground) + 0.05 < math.sqrt(1.05 * 0.05) else "#000000"


_MARGIN, _LENGTH, _HEIGHT = 90, 960, 130  # of each chart of a profile
_PARTS: tuple[EventKind, ...] = ("forward", "backward", "update")
_PLAIN = "#6b7785"  # no kind of event has this colour


def profile_svg(profile: Profile) -> str:
    """Draw charts of time, weights and output, with a bar per layer whose name and numbers show when pointed at."""
    layers, plain = profile.layers, [_PLAIN]
    charts: tuple[tuple[str, Sequence[Sequence[float]], Sequence[str]], ...] = (
        ("time", [[la.forward_s, la.backward_s, la.update_s] for la in layers], [COLOURS[kind] for kind in _PARTS]),
        ("weights", [[layer.weight_bytes] for layer in layers], plain),
        ("output", [[output_bytes(layer)] for layer in layers], plain),
    )
    titles = [
        f"{layer.name} ({layer.op}): {format_seconds(time_s(layer))}, weights {format_bytes(layer.weight_bytes)}, "
        f"output {format_bytes(output_bytes(layer))}"
        for layer in layers
    ]
    samples = f", {profile.microbatch_size} samples" if profile.microbatch_size is not None else ""
    parts = [text(_MARGIN, 16, f"{profile.model} on {profile.device.name}{samples}, {profile.provenance.source}")]
    parts += [text(_MARGIN + 120 * i, 34, f"■ {kind}", Font(12, fill=COLOURS[kind])) for i, kind in enumerate(_PARTS)]
    step, bottom, label = _LENGTH / len(layers), 4.0, Font(12, "end")
    for name, bars, colours in charts:
        most, bottom = max(map(sum, bars)) or 1.0, bottom + _HEIGHT + 46
        parts.append(text(_MARGIN - 8, bottom, name, label))
        written = format_seconds(most) if name == "time" else format_bytes(most)
        parts.append(text(_MARGIN - 8, bottom - _HEIGHT + 10, written, label))
        parts.append(line((_MARGIN, bottom), (_MARGIN + _LENGTH, bottom), "#000000"))
        for number, values in enumerate(bars):
            top = bottom
            for value, colour in zip(values, colours, strict=True):
                height = _HEIGHT * value / most
                top -= height
                if height:
                    size = max(0.5, step * 0.9), height
                    parts.append(box((_MARGIN + number * step, top), size, colour, titles[number]))
    return document(_MARGIN + _LENGTH + 20, bottom + 36, parts)


_VALUES, _BARS, _ROW, _WIDTH = 110, 420, 26, 860  # of a sweep
_DATA_PARALLEL = "#d55e00"


def sweep_svg(sweep: Sweep) -> str:
    """Draw a bar per value as long as its plan is fast, with its config, and a mark for data parallelism."""
    # Where the time was over, a change is as far as a point of the sweep.
    found = {point.value: point for point in (*sweep.points, *(change.above for change in sweep.changes))}
    points = [found[value] for value in sorted(found)]
    marks = [_data_parallel_per_s(point) for point in points]
    scale = _BARS / (max(point.rate_per_s for point in points) or 1.0)
    parts = [
        text(16, 26, f"{sweep.model}: the fastest plan by {sweep.quantity}", Font(17, weight="bold")),
        text(_VALUES, 48, f"{sweep.rate_unit}; the mark is data parallelism" if any(marks) else sweep.rate_unit),
    ]
    y = 60.0
    for point, mark in zip(points, marks, strict=True):
        value, config = value_text(point.value, sweep.quantity), short_config(point.config or NONE_FITS)
        end = _VALUES + point.rate_per_s * scale
        parts.append(text(_VALUES - 8, y + 15, value, Font(anchor="end")))
        parts.append(box((_VALUES, y), (max(end - _VALUES, 0.5), _ROW - 6), COLOURS["forward"], f"{value}: {config}"))
        if mark:
            parts.append(box((_VALUES + mark * scale - 1.5, y - 2), (3, _ROW - 2), _DATA_PARALLEL))
        parts.append(text(end + 10, y + 15, format_rate(point.rate_per_s) if point.config else ""))
        parts.append(text(end + 70, y + 15, config))
        y += _ROW
    return document(_WIDTH, y + 10, parts)


def _data_parallel_per_s(point: SweepPoint) -> float:
    """Return the speed of data parallelism; 0 where it is not known or does not fit."""
    if not point.speedup_over_data_parallel or point.data_parallel_over_memory_bytes:
        return 0.0
    return point.rate_per_s / point.speedup_over_data_parallel


WIDTH, LEFT, RIGHT, TOP = 1200, 100, 16, 60  # of a timeline
_HEIGHTS: dict[Lane, int] = {"compute": 22, "send": 7, "receive": 7, "all-reduce": 7}
_GAP = 8
_CHARACTER = 7.0  # at most this wide
_TICK = 80  # least distance between two ticks
_MOST = 20_000  # events in a picture; if there are more, those below a quarter of a pixel are left out


def timeline_svg(runs: Sequence[Timeline], window: tuple[float, float] | None = None) -> str:
    """Draw one run, or a simulated and a measured one with the rows of each worker below each other.

    Args:
        runs: the simulated one first.
        window: from when to when, in the first run's seconds; None for all. The other run is then moved so that both
            begin the first minibatch of the window together, as on the page.
    """
    first, last = window or (0.0, max((run.span_s for run in runs), default=0.0) or 1.0)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    least_s = 0.25 / scale if window or sum(len(run.events) for run in runs) > _MOST else 0.0
    begun = [_begun_s(run) for run in runs]
    from_ = min((n for n, s in begun[0].items() if window and s >= first and n in begun[-1]), default=None)
    lefts = [first if from_ is None else first + starts[from_] - begun[0][from_] for starts in begun]
    parts = [text(8, 20, f"{runs[0].model}: {runs[0].config}, {runs[0].schedule}", Font(15))]
    x, y = float(LEFT), float(TOP)
    for colour, name in colour_legend(kind for run in runs for kind in run.events.kind):
        parts += [box((x, 29), (11, 11), colour), text(x + 16, 39, name, Font(12))]
        x += 34 + _CHARACTER * len(name)
    drawn = []
    for rank, rows in rows_of(runs, shown_workers(runs[0])).items():
        drawn.append(text(8, y + 15, f"worker {rank}"))
        for row in rows:
            run, left = runs[row.run], lefts[row.run]
            if row.lane == "compute" and row.run > 0:
                drawn.append(text(8, y + 15, run.source, Font(11)))
            for event in row.events:
                start, end = max(event.start_s - left, 0.0), min(event.end_s - left, last - first)
                if end - start >= least_s:
                    drawn.append(_event(run, event, (LEFT + start * scale, y), (end - start) * scale))
            y += _HEIGHTS[row.lane] + 1
        y += _GAP
    return document(WIDTH, y, [*parts, *_axis(first, last, y), *drawn])


def _begun_s(run: Timeline) -> dict[int, float]:
    """Return when each minibatch begins, in stage 0."""
    found: dict[int, float] = {}
    for event in run.events.rows():
        if event.stage == 0 and event.kind == "forward":
            found.setdefault(event.minibatch, event.start_s)
    return found


def _event(run: Timeline, event: Event, corner: Point, width: float) -> str:
    (x, y), name, colour = corner, run.name_of(event), COLOURS[event.kind]
    title = f"{name}: {TEXTS[event.kind]}, {format_seconds(event.start_s)} to {format_seconds(event.end_s)}"
    drawn = box(corner, (max(width - 0.5, 0.3), _HEIGHTS[event.lane]), colour, title)
    fits = event.lane == "compute" and width >= len(name) * _CHARACTER + 2
    return drawn + text(x + width / 2, y + 15, name, Font(11, "middle", ink_on(colour))) if fits else drawn


def _axis(first: float, last: float, bottom: float) -> Iterator[str]:
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    least = _TICK / scale
    size = 10.0 ** math.floor(math.log10(least))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= least * (1 - 1e-9))
    for number in range(math.ceil(first / step), int(last / step) + 1):
        x = LEFT + (number * step - first) * scale
        yield line((x, TOP - 6), (x, bottom), "#dddddd")
        if x < WIDTH - 30:
            yield text(x, TOP - 9, format_seconds(number * step), Font(11, "middle"))
