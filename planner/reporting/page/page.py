"""The report: one HTML file that needs nothing else, not even a network.

Puts together the parts in `html/`. All text goes through `escape`; the charts' data is JSON in a script element of its
own, and the page's content security policy forbids it to load anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any

from planner.analysis.compare import Comparison
from planner.analysis.compare_runs import compare_runs
from planner.analysis.explain import Explanation
from planner.analysis.sweep import Sweep
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.timeline import LANES, LETTERS, Timeline
from planner.reporting.page.sections import (
    comparison_section,
    figures,
    limits_section,
    measured_section,
    memory_section,
    paragraph,
    stages_section,
    sweep_section,
    timeline_section,
)
from planner.reporting.svg import ink_on
from planner.reporting.tables.plan import cluster_line, gpus, schedule_line
from planner.reporting.timeline import COLOURS, TEXTS, Row, opening, rows_of, shown_workers
from planner.simulator.simulate_plan import ROUNDS
from planner.simulator.summary import Summary, summarize
from planner.version import __version__

KINDS = tuple(LANES)
SCRIPTS = ("axis.js", "timeline.js", "memory.js", "page.js")
_DIGITS = 7  # of a time, relative to the run: finer than a pixel at the largest zoom


def report_page(
    plan: Plan,
    simulated: Timeline,
    measured: Timeline | None = None,
    comparison: Comparison | None = None,
    sweep: Sweep | None = None,
    explanation: Explanation | None = None,
    *,
    why_not: str = "",
    source: str = "",
) -> str:
    """Write the page, which leaves out what is None.

    Args:
        plan: that the report is about.
        simulated: its simulation.
        measured: a run of it.
        comparison: with other plans.
        sweep: over the bandwidth.
        explanation: of what limits it.
        why_not: why there is no comparison, explanation and sweep.
        source: of the profile's times, "estimated" or so.

    Raises:
        InputError: if the measured run is of another plan.
    """
    runs, summary = [simulated], summarize(simulated)
    run = ran = None
    if measured is not None:
        runs.append(measured)
        run = compare_runs(plan, simulated, measured)
        ran = run.measured
    timeline = fill("timeline.html", timeline_section(runs, shown_workers(simulated)))
    # Each has an anchor, a title and HTML.
    sections = [
        ("summary", "Summary", figures(plan, summary, ran)),
        ("measured", "Predicted and measured", run and measured_section(plan, run)),
        ("limits", "Bottleneck", limits_section(plan, summary, explanation)),
        ("stages", "Stages", stages_section(plan, source)),
        ("timeline", "Timeline", timeline),
        ("memory", "Memory", memory_section(plan, summary, ran)),
        ("comparison", "Compared with other plans", comparison and comparison_section(comparison)),
        ("sweep", "At other bandwidths", sweep and sweep_section(sweep)),
        ("missing", "Not in this report", why_not and paragraph(why_not, "note")),
    ]
    shown = [section for section in sections if section[2]]
    solver = plan.solver
    return fill(
        "page.html",
        {
            "title": escape(f"{plan.model}: {short_config(plan.config)}"),
            "heading": escape(f"{plan.model}: {short_config(plan.config)} on {gpus(plan.workers)}"),
            "lead": escape(f"{schedule_line(plan)} · {cluster_line(plan.cluster)}"),
            "contents": " ".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown),
            "sections": "\n".join(
                f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n{body}\n'
                "</section>"
                for name, title, body in shown
            ),
            "footer": escape(
                f"plan {__version__} · profile {plan.profile_digest} on {plan.device.name} · "
                f"{solver.name}, {solver.status} · cost model {solver.cost_model}"
            ),
            "style": _part("page.css"),
            "script": "\n".join(map(_part, SCRIPTS)),
            "data": script_json(_chart_data(runs, summary)),
        },
    )


def fill(name: str, values: dict[str, str]) -> str:
    """Fill the `{{ places }}` of a part."""
    return re.sub(r"\{\{ (\w+) \}\}", lambda place: values[place[1]], _part(name))


def _part(name: str) -> str:
    return files("planner.reporting.page").joinpath("html").joinpath(name).read_text(encoding="utf-8")


def script_json(content: object) -> str:
    """Write JSON in which nothing can end the script element around it or begin a comment."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _chart_data(runs: Sequence[Timeline], summary: Summary) -> dict[str, Any]:
    """Return what the scripts draw.

    Times are whole numbers of `tick_s`, and each start is told by its distance from the one before: that is a third of
    the size.
    """
    first = runs[0]
    workers = shown_workers(first)
    stages = {worker.rank: ", ".join(map(str, worker.stages)) for worker in summary.workers}
    span = max(run.span_s for run in runs)
    digits = max(0, _DIGITS - math.floor(math.log10(span))) if span > 0 else 0
    rows = rows_of(runs, workers)
    return {
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
        "workers": [
            {
                "rank": rank,
                "stages": stages[rank],
                "rows": [_columns(row, runs[row.run].source, digits) for row in rows[rank]],
            }
            for rank in workers
        ],
        "memory": list(filter(None, (_memory(runs, rank, digits) for rank in workers))),
    }


def _columns(row: Row, source: str, digits: int) -> dict[str, Any]:
    """Write a row's events as columns."""
    scale, events = 10.0**digits, row.events
    starts = [round(event.start_s * scale) for event in events]
    return {
        "lane": row.lane,
        "source": source,
        "step": [start - before for before, start in pairwise((0, *starts))],
        "length": [round(event.end_s * scale) - start for event, start in zip(events, starts, strict=True)],
        "kind": _column(KINDS.index(event.kind) for event in events),
        "stage": _column(event.stage for event in events),
        "minibatch": _column(event.minibatch for event in events),
        "microbatch": _column(event.microbatch for event in events),
        "peer": _column(-1 if event.peer_rank is None else event.peer_rank for event in events),
    }


def _column(values: Iterable[int]) -> list[int] | int:
    """Return the values, or the only value that they have."""
    found = list(values)
    return found[0] if len(set(found)) == 1 else found


def _memory(runs: Sequence[Timeline], rank: int, digits: int) -> dict[str, Any] | None:
    curves = [(run.source, curve) for run in runs for curve in run.memory if curve.rank == rank]
    drawn = [
        {"source": source, "time_s": [round(s, digits) for s in curve.time_s], "held_bytes": list(curve.held_bytes)}
        for source, curve in curves
    ]
    return {"rank": rank, "limit_bytes": curves[0][1].limit_bytes, "curves": drawn} if drawn else None
