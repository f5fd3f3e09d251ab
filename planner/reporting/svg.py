"""Draw timelines as SVG, without a plotting library, for notebooks and pages; and what other
pictures are drawn with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.formats.files import write_text
from planner.formats.timeline import Event, Lane, Timeline
from planner.reporting.timeline import COLOURS, TEXTS, colour_legend, ink_on, rows_of, shown_workers
from planner.units import format_seconds

# The first are from Okabe & Ito 2008, for the colour-blind.
CURVES = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255"),
    *("#999933", "#332288", "#aa4499", "#44aa99", "#661100", "#6699cc", "#888888"),
)


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
        f'font-family="Helvetica, Arial, sans-serif" font-size="{font.size}" '
        f'font-weight="{font.weight}" '
        f'text-anchor="{font.anchor}" fill="{font.fill}"'
    )
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def box(corner: Point, size: Point, fill: str, title: str = "") -> str:
    """Draw a rectangle from its upper left corner; browsers show the title when it is
    pointed at.
    """
    inner = "/>"
    if title:
        inner = f"><title>{escape(title)}</title></rect>"
    x, y = corner
    width, height = size
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{fill}"{inner}'
    )


def line(start: Point, end: Point, stroke: str, dash: str = "") -> str:
    """Draw a line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    x1, y1 = start
    x2, y2 = end
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}/>'
    )


def polyline(points: Iterable[Point], stroke: str, dash: str = "") -> str:
    """Draw lines from point to point."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-width="2"{dashed}/>'


def marker(place: Point, fill: str) -> str:
    """Draw a dot."""
    x, y = place
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}"/>'


WIDTH, LEFT, RIGHT, TOP = 1200, 100, 16, 60  # of a timeline
_HEIGHTS: dict[Lane, int] = {"compute": 22, "send": 7, "receive": 7, "all-reduce": 7}
_GAP = 8
_CHARACTER = 7.0  # at most this wide
_TICK = 80  # least distance between two ticks
# events in a picture; if there are more, those below a quarter of a pixel are left out
_MOST = 20_000


def timeline_svg(runs: Sequence[Timeline], window: tuple[float, float] | None = None) -> str:
    """Draw one run, or a simulated and a measured one with the rows of each worker below each
    other.

    Args:
        runs: the simulated one first.
        window: from when to when, in the first run's seconds; None for all. The other run is then
            moved so that both begin the first minibatch of the window together, as on the page.
    """
    first, last = window or (0.0, max((run.span_s for run in runs), default=0.0) or 1.0)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)  # pixels per second
    least_s = 0.0
    if window or sum(len(run.events) for run in runs) > _MOST:
        least_s = 0.25 / scale
    lefts = _left_edges(runs, window)

    drawn = []
    y = float(TOP)
    for rank, rows in rows_of(runs, shown_workers(runs[0])).items():
        drawn.append(text(8, y + 15, f"worker {rank}"))

        for row in rows:
            run = runs[row.run]
            if row.lane == "compute" and row.run > 0:
                drawn.append(text(8, y + 15, run.source, Font(11)))

            for event in row.events:
                start = max(event.start_s - lefts[row.run], 0.0)
                end = min(event.end_s - lefts[row.run], last - first)
                if end - start >= least_s:
                    corner = (LEFT + start * scale, y)
                    drawn.append(_event(run, event, corner, (end - start) * scale))
            y += _HEIGHTS[row.lane] + 1
        y += _GAP

    title = text(8, 20, f"{runs[0].model}: {runs[0].config}, {runs[0].schedule}", Font(15))
    return document(WIDTH, y, [title, *_legend(runs), *_axis(first, last, y), *drawn])


def _left_edges(runs: Sequence[Timeline], window: tuple[float, float] | None) -> list[float]:
    """Return which second of each run is at the left edge: where the window begins, moved in the
    other run so that both begin the first minibatch of the window together.
    """
    if window is None:
        return [0.0] * len(runs)

    first, _ = window
    begun = [_begun_s(run) for run in runs]
    in_both = [
        number for number, start in begun[0].items() if start >= first and number in begun[-1]
    ]
    if not in_both:
        return [first] * len(runs)

    number = min(in_both)
    return [first + starts[number] - begun[0][number] for starts in begun]


def _legend(runs: Sequence[Timeline]) -> list[str]:
    """Draw the colours of the kinds of events, each with its name, in one line."""
    parts = []
    x = float(LEFT)
    for colour, name in colour_legend(kind for run in runs for kind in run.events.kind):
        parts += [box((x, 29), (11, 11), colour), text(x + 16, 39, name, Font(12))]
        x += 34 + _CHARACTER * len(name)
    return parts


def _begun_s(run: Timeline) -> dict[int, float]:
    """Return when each minibatch begins, in stage 0."""
    found: dict[int, float] = {}
    for event in run.events.rows():
        if event.stage == 0 and event.kind == "forward":
            found.setdefault(event.minibatch, event.start_s)
    return found


def _event(run: Timeline, event: Event, corner: Point, width: float) -> str:
    """Draw an event as a box, with its name where there is room."""
    name = run.name_of(event)
    colour = COLOURS[event.kind]

    start = format_seconds(event.start_s)
    end = format_seconds(event.end_s)
    title = f"{name}: {TEXTS[event.kind]}, {start} to {end}"
    size = (max(width - 0.5, 0.3), _HEIGHTS[event.lane])
    drawn = box(corner, size, colour, title)

    fits = event.lane == "compute" and width >= len(name) * _CHARACTER + 2
    if not fits:
        return drawn
    x, y = corner
    return drawn + text(x + width / 2, y + 15, name, Font(11, "middle", ink_on(colour)))


def _axis(first: float, last: float, bottom: float) -> Iterator[str]:
    """Draw vertical lines at round times, each with its time above."""
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    for at in round_ticks(first, last, _TICK / scale):
        x = LEFT + (at - first) * scale
        yield line((x, TOP - 6), (x, bottom), "#dddddd")

        has_room = x < WIDTH - 30
        if has_room:
            yield text(x, TOP - 9, format_seconds(at), Font(11, "middle"))


_ROUNDING = 1e-9


def round_ticks(first: float, last: float, least_step: float) -> list[float]:
    """Return the round numbers from `first` to `last`, as far apart as `least_step` at least.

    They are multiples of 1, 2 or 5 times a power of ten.
    """
    step = _round_step(least_step)
    # a quotient that is a whole number may come out a bit above or below it
    begin = math.ceil(first / step - _ROUNDING)
    end = math.floor(last / step + _ROUNDING)
    return [number * step for number in range(begin, end + 1)]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is no less."""
    size = 10.0 ** math.floor(math.log10(least))
    for factor in (1, 2, 5):
        if factor * size >= least * (1 - 1e-9):
            return factor * size
    return 10 * size


@dataclass(frozen=True)
class Picture:
    """A picture that a cell of a notebook shows."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        """Write the picture to a file."""
        write_text(Path(path), self.svg)


def plot(run: Timeline, window: tuple[float, float] | None = None, axes: Any = None) -> Any:
    """Return the picture of a run; `planner.formats.timeline.Timeline.plot` says how."""
    if window is not None and not (isinstance(window, tuple | list) and len(window) == 2):
        raise InputError(
            f"`window={window!r}` is no pair of times", hint="give two, in seconds: window=(0.5, 1)"
        )
    if axes is None:
        return Picture(timeline_svg([run], window))

    names = []
    ticks = []
    row_number = 0
    for rank, rows in rows_of([run], shown_workers(run)).items():
        ticks.append(row_number)
        names.append(f"worker {rank}")
        for row in rows:
            for event in row.events:
                bar = [(event.start_s, event.end_s - event.start_s)]
                axes.broken_barh(bar, (row_number - 0.4, 0.8), facecolors=COLOURS[event.kind])
            row_number += 1

    axes.set_yticks(ticks, names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    if window is not None:
        axes.set_xlim(*window)
    return axes
