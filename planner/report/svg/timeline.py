"""A timeline as a picture: what every worker computes and its links carry, with names where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planner.formats.timeline import LANES, Event, Kind, Lane, Timeline
from planner.report.svg.lanes import COLOURS, LANE_ORDER, TEXTS, shown_workers, side_by_side
from planner.units import format_seconds

WIDTH, LEFT, RIGHT, TOP = 1200, 100, 16, 60
_HEIGHTS: dict[Lane, int] = {"compute": 22, "send": 7, "receive": 7, "all-reduce": 7}
_GAP = 8
_CHARACTER = 7.0  # at most so wide
_MOST = 20_000  # events in a picture; beyond, those that are narrower than a quarter of a pixel are left out
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


def timeline_svg(runs: Sequence[Timeline]) -> str:
    """An SVG document of one run, or of a simulated and a measured one beneath each other per worker."""
    span = max((run.span_s for run in runs), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / span
    least_s = 0.25 / scale if sum(len(run.events) for run in runs) > _MOST else 0.0
    parts, y = [], float(TOP)
    for rank in shown_workers(runs[0]):
        parts.append(_text(8, y + 15, f"worker {rank}", size=13))
        for run in runs:
            rows: dict[tuple[int, int], list[Event]] = {}
            for event, row in side_by_side(e for e in run.events.rows() if e.rank == rank):
                rows.setdefault((LANE_ORDER.index(event.lane), row), []).append(event)
            for (lane, _), events in sorted(rows.items()):
                height = _HEIGHTS[LANE_ORDER[lane]]
                if len(runs) > 1 and lane == 0 and run is not runs[0]:
                    parts.append(_text(8, y + 15, run.source, size=11))
                parts += [_event(run, e, y, height, scale) for e in events if e.end_s - e.start_s >= least_s]
                y += height + 1
        y += _GAP
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}">',
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="white"/>',
        _text(8, 20, f"{runs[0].model}: {runs[0].config}, {runs[0].schedule}", size=15),
        *_legend(runs),
        *_axis(span, scale, y),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _event(run: Timeline, event: Event, y: float, height: int, scale: float) -> str:
    x, width = LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
    name = run.name_of(event)
    title = f"{name}: {TEXTS[event.kind]}, {format_seconds(event.start_s)} to {format_seconds(event.end_s)}"
    box = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width - 0.5, 0.3):.2f}" height="{height}" '
        f'fill="{COLOURS[event.kind]}"><title>{escape(title)}</title></rect>'
    )
    if height < 15 or width < len(name) * _CHARACTER + 2:
        return box
    return box + _text(x + width / 2, y + 15, name, size=11, fill="#ffffff", anchor="middle")


def _legend(runs: Sequence[Timeline]) -> list[str]:
    """A swatch per colour."""
    kinds = {kind for run in runs for kind in run.events.kind}
    names: dict[str, list[Kind]] = {}
    for kind in LANES:
        if kind in kinds:
            names.setdefault(COLOURS[kind], []).append(kind)
    x, parts = float(LEFT), []
    for colour, group in names.items():
        text = TEXTS[group[0]] if LANES[group[0]] in ("compute", "all-reduce") else TEXTS[group[0]].rsplit(" ", 1)[0]
        parts.append(f'<rect x="{x:.0f}" y="29" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 39, text, size=12))
        x += 34 + _CHARACTER * len(text)
    return parts


def _axis(span: float, scale: float, bottom: float) -> list[str]:
    step = next(n * 10.0**p for p in range(-12, 15) for n in (1, 2, 5) if n * 10.0**p * scale >= 80)
    parts = []
    for number in range(int(span / step) + 1):
        x = LEFT + number * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom:.0f}" stroke="#dddddd"/>')
        if x < WIDTH - 30:
            parts.append(_text(x, TOP - 9, format_seconds(number * step), size=11, anchor="middle"))
    return parts


def _text(x: float, y: float, text: str, *, size: int, fill: str = "#222222", anchor: str = "start") -> str:
    style = f'{_FONT} font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
