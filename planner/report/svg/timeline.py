"""Draw a timeline: what every worker computes and its links carry, with names where they fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.formats.timeline import Event, Lane, Timeline
from planner.report.svg.shapes import Font, Point, box, document, ink_on, line, round_step, text
from planner.report.timeline import COLOURS, TEXTS, colour_legend, rows_of, shown_workers
from planner.units import format_seconds

WIDTH, LEFT, RIGHT, TOP = 1200, 100, 16, 60
_HEIGHTS: dict[Lane, int] = {"compute": 22, "send": 7, "receive": 7, "all-reduce": 7}
_GAP = 8
_CHARACTER = 7.0  # at most this wide
_TICK = 80  # least distance between two ticks
_MOST = 20_000  # events in a picture; if there are more, those below a quarter of a pixel are left out
_SMALL = Font(11)


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
    parts, y = [], float(TOP)
    for rank, rows in rows_of(runs, shown_workers(runs[0])).items():
        parts.append(text(8, y + 15, f"worker {rank}"))
        for row in rows:
            run, left = runs[row.run], lefts[row.run]
            if row.lane == "compute" and row.run > 0:
                parts.append(text(8, y + 15, run.source, _SMALL))
            for event in row.events:
                start, end = max(event.start_s - left, 0.0), min(event.end_s - left, last - first)
                if end - start >= least_s:
                    parts.append(_event(run, event, (LEFT + start * scale, y), (end - start) * scale))
            y += _HEIGHTS[row.lane] + 1
        y += _GAP
    title = text(8, 20, f"{runs[0].model}: {runs[0].config}, {runs[0].schedule}", Font(15))
    return document(WIDTH, y, [title, *_legend(runs), *_axis(first, last, y), *parts])


def _begun_s(run: Timeline) -> dict[int, float]:
    """Return when each minibatch begins, in stage 0."""
    found: dict[int, float] = {}
    for event in run.events.rows():
        if event.stage == 0 and event.kind == "forward":
            found.setdefault(event.minibatch, event.start_s)
    return found


def _event(run: Timeline, event: Event, corner: Point, width: float) -> str:
    (x, y), name, height = corner, run.name_of(event), _HEIGHTS[event.lane]
    title = f"{name}: {TEXTS[event.kind]}, {format_seconds(event.start_s)} to {format_seconds(event.end_s)}"
    colour = COLOURS[event.kind]
    drawn = box((x, y), (max(width - 0.5, 0.3), height), colour, title)
    fits = event.lane == "compute" and width >= len(name) * _CHARACTER + 2
    return drawn + text(x + width / 2, y + 15, name, Font(11, "middle", ink_on(colour))) if fits else drawn


def _legend(runs: Sequence[Timeline]) -> Iterator[str]:
    x = float(LEFT)
    for colour, name in colour_legend(kind for run in runs for kind in run.events.kind):
        yield box((x, 29), (11, 11), colour)
        yield text(x + 16, 39, name, Font(12))
        x += 34 + _CHARACTER * len(name)


def _axis(first: float, last: float, bottom: float) -> Iterator[str]:
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    step = round_step(_TICK / scale)
    for number in range(math.ceil(first / step), int(last / step) + 1):
        x = LEFT + (number * step - first) * scale
        yield line((x, TOP - 6), (x, bottom), "#dddddd")
        if x < WIDTH - 30:
            yield text(x, TOP - 9, format_seconds(number * step), Font(11, "middle"))
