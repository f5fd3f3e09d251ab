"""Draw sweeps as SVG, written by hand so that drawing needs no plotting library."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from planner.analysis.sweep import Sweep
from planner.formats.plan_parts import short_config
from planner.reporting.tables.answers import NONE_FITS, value_text
from planner.reporting.timeline import COLOURS
from planner.units import format_rate

Point = tuple[float, float]


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


def box(corner: Point, size: Point, fill: str, title: str = "") -> str:
    """Draw a rectangle from its upper left corner; browsers show the title when it is pointed at."""
    inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
    (x, y), (width, height) = corner, size
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"{inner}'


_VALUES, _BARS, _ROW, _WIDTH = 110, 420, 26, 860  # of a sweep
_DATA_PARALLEL = "#d55e00"


def sweep_svg(sweep: Sweep) -> str:
    """Draw a bar per value as long as its plan is fast, with its config, and a mark for data parallelism."""
    # Where the time was over, a change is as far as a point of the sweep.
    found = {point.value: point for point in (*sweep.points, *(change.above for change in sweep.changes))}
    scale = _BARS / (max(point.rate_per_s for point in found.values()) or 1.0)
    title = text(16, 26, f"{sweep.model}: the fastest plan by {sweep.quantity}", Font(17, weight="bold"))
    parts, marked, y = list[str](), "", 60.0
    for _, point in sorted(found.items()):
        value, config = value_text(point.value, sweep.quantity), short_config(point.config or NONE_FITS)
        length = point.rate_per_s * scale
        parts.append(text(_VALUES - 8, y + 15, value, Font(anchor="end")))
        parts.append(box((_VALUES, y), (max(length, 0.5), _ROW - 6), COLOURS["forward"], f"{value}: {config}"))
        if point.speedup_over_data_parallel and not point.data_parallel_over_memory_bytes:
            marked = "; the mark is data parallelism"
            x = _VALUES + length / point.speedup_over_data_parallel
            parts.append(box((x - 1.5, y - 2), (3, _ROW - 2), _DATA_PARALLEL))
        parts.append(text(_VALUES + length + 10, y + 15, format_rate(point.rate_per_s) if point.config else ""))
        parts.append(text(_VALUES + length + 70, y + 15, config))
        y += _ROW
    unit = "samples/s" if any(point.samples_per_s for point in sweep.points) else "batches/s"
    return document(_WIDTH, y + 10, [title, text(_VALUES, 48, unit + marked), *parts])
