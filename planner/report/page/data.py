"""The data of the report's charts, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from planner.formats.timeline import LANES, LETTERS, Event, EventKind, Timeline
from planner.report.svg.lanes import COLOURS, TEXTS, opening, rows_of, shown_workers
from planner.report.svg.shapes import ink_on
from planner.simulator.recorded import ROUNDS
from planner.simulator.summary import Summary

KINDS: tuple[EventKind, ...] = tuple(LANES)
_DIGITS = 7  # of a time, relative to the run: finer than a pixel at the largest zoom


def chart_data(runs: Sequence[Timeline], summary: Summary) -> str:
    """Return JSON that is safe inside a script element.

    Times are whole numbers of `tick_s`, and each start is told by its distance from the one before: that is a third of
    the size.

    Args:
        runs: the simulated run, and the measured one if there is one.
        summary: of the first.
    """
    first = runs[0]
    workers = shown_workers(first)
    stages = {worker.rank: ", ".join(map(str, worker.stages)) for worker in summary.workers}
    span = max(run.span_s for run in runs)
    digits = max(0, _DIGITS - math.floor(math.log10(span))) if span > 0 else 0
    rows: dict[int, list[dict[str, Any]]] = {rank: [] for rank in workers}
    for run in runs:
        events: dict[int, list[Event]] = {rank: [] for rank in workers}
        for event in run.events.rows():
            if event.rank in events:
                events[event.rank].append(event)
        for rank in workers:
            rows[rank] += _rows(run.source, events[rank], digits)
    content = {
        "span_s": span,
        "tick_s": 10.0**-digits,
        "ends": {run.source: run.span_s for run in runs},
        "opening": opening(summary, first, span),
        "steady": [summary.steady_from_s, summary.steady_to_s] if summary.steady else None,
        "microbatches": first.microbatches,
        "pipeline_length": first.pipeline_length,
        "kinds": [
            {
                "letter": LETTERS[kind],
                "text": TEXTS[kind],
                "colour": COLOURS[kind],
                "ink": ink_on(COLOURS[kind]),
                "once": kind in ROUNDS,
            }
            for kind in KINDS
        ],
        "workers": [{"rank": rank, "stages": stages[rank], "rows": rows[rank]} for rank in workers],
        "memory": _memory(runs, workers, digits),
    }
    return script_json(content)


def script_json(content: object) -> str:
    """Write JSON in which nothing can end the script element around it or begin a comment."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _rows(source: str, own: Sequence[Event], digits: int) -> list[dict[str, Any]]:
    """Write a worker's rows of events, each as columns."""
    scale = 10.0**digits
    rows = []
    for lane, events in rows_of(own):
        starts = [round(event.start_s * scale) for event in events]
        rows.append(
            {
                "lane": lane,
                "source": source,
                "step": [start - before for before, start in pairwise((0, *starts))],
                "length": [round(event.end_s * scale) - start for event, start in zip(events, starts, strict=True)],
                "kind": _column(KINDS.index(event.kind) for event in events),
                "stage": _column(event.stage for event in events),
                "minibatch": _column(event.minibatch for event in events),
                "microbatch": _column(event.microbatch for event in events),
                "peer": _column(-1 if event.peer_rank is None else event.peer_rank for event in events),
            }
        )
    return rows


def _column(values: Iterable[int]) -> list[int] | int:
    """Return the values, or the only value that they have."""
    found = list(values)
    return found[0] if len(set(found)) == 1 else found


def _memory(runs: Sequence[Timeline], workers: Sequence[int], digits: int) -> list[dict[str, Any]]:
    strips = []
    for rank in workers:
        curves = [(run.source, curve) for run in runs for curve in run.memory if curve.rank == rank]
        drawn = [
            {"source": source, "time_s": [round(s, digits) for s in curve.time_s], "held_bytes": list(curve.held_bytes)}
            for source, curve in curves
        ]
        if drawn:
            strips.append({"rank": rank, "limit_bytes": curves[0][1].limit_bytes, "curves": drawn})
    return strips
