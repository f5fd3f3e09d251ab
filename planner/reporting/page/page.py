"""The report: one HTML file that needs nothing else, not even a network.

Puts together the parts in `html/`. Whatever comes from files goes through `escape`; the charts'
data is JSON in a script element of its own, and the page's content security policy forbids it to
load anything.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any

from planner.analysis.compare import Comparison
from planner.analysis.compare_runs import RunComparison, compare_runs
from planner.analysis.explain import Explanation
from planner.analysis.limits import Limits, busiest
from planner.formats.plan import Plan
from planner.formats.plan_parts import Prediction, config_words
from planner.formats.timeline import LANES, LETTERS, Event, Timeline
from planner.reporting.tables import plan as words
from planner.reporting.tables import runs as run_tables
from planner.reporting.tables.answers import (
    busy_table,
    comparison_legend,
    comparison_table,
    sentences,
)
from planner.reporting.tables.plan import memory_table, stage_table
from planner.reporting.tables.table import Table
from planner.reporting.tables.verdict import synchronous_ways, synchronous_words, verdict
from planner.reporting.timeline import (
    COLOURS,
    TEXTS,
    Row,
    colour_legend,
    ink_on,
    opening,
    rows_of,
    shown_workers,
)
from planner.simulator.excerpt import ROUNDS
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import Summary, WorkerUse, summarize
from planner.units import counted, format_bytes, format_memory, format_rate, format_seconds
from planner.version import __version__

MOST_STAGES = 12  # whose table is open from the start
_IN_FLIGHT = (
    "In flight: microbatches whose activations a worker holds at once (whole minibatches under "
    "1f1b)."
)
_LATE = (
    " Stale: updates between the weights that a gradient was computed with and those that it "
    "changes."
)
KINDS = tuple(LANES)
_LOOKS = {"l": "", "r": ' class="number"'}  # of a cell, by its alignment
SCRIPTS = ("axis.js", "timeline.js", "memory.js", "page.js")
Tile = tuple[str, str, str]  # a name, its value, and what stands below it in small letters
_DIGITS = 7  # of a time, relative to the run: finer than a pixel at the largest zoom


def report_page(
    plan: Plan,
    simulated: Timeline,
    measured: Timeline | None = None,
    comparison: Comparison | None = None,
    explanation: Explanation | None = None,
    *,
    why_not: str = "",
    source: str = "",
) -> str:
    """Write the page; raise InputError if the measured run is of another plan.

    What is None is left out; `why_not` says why, and `source` what the profile's times come from.
    """
    runs = [simulated] if measured is None else [simulated, measured]
    summary = summarize(simulated)
    run = None
    if measured is not None:
        run = compare_runs(simulated, measured)
    ran = None if run is None else run.measured
    timeline = (
        fill("timeline.html", timeline_section(runs, shown_workers(simulated)))
        + restarts_list(runs[-1])
        + drift_list(runs[-1])
    )
    # Each has an anchor, a title and HTML.
    sections = [
        ("summary", "Summary", figures(plan, summary, ran)),
        ("measured", "Predicted and measured", run and measured_section(plan, run)),
        ("limits", "Bottleneck", limits_section(plan, summary, explanation)),
        ("stages", "Stages", stages_section(plan, source)),
        ("timeline", "Timeline", timeline),
        ("memory", "Memory", memory_section(summary, ran)),
        ("comparison", "Compared with other plans", comparison and comparison_section(comparison)),
        ("missing", "Not in this report", why_not and paragraph(why_not, "note")),
    ]
    shown = [section for section in sections if section[2]]
    solver = plan.solver
    return fill(
        "page.html",
        {
            "title": escape(f"{plan.model}: {config_words(plan.config, plan.context_ranks)}"),
            "heading": escape(
                f"{plan.model}: {config_words(plan.config, plan.context_ranks)} on "
                f"{counted(plan.workers, 'GPU')}"
            ),
            "lead": escape(f"{words.schedule_line(plan)} · {words.cluster_line(plan.cluster)}"),
            "contents": " ".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown),
            "sections": "\n".join(
                f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 '
                f'id="{name}-title">{title}</h2>\n{body}\n'
                "</section>"
                for name, title, body in shown
            ),
            "footer": escape(
                f"plan {__version__} · profile {plan.profile_digest} on {plan.device.name} · "
                f"{solver.name}, {solver.status}"
            ),
            "style": _part("page.css"),
            "script": "\n".join(map(_part, SCRIPTS)),
            "data": script_json(_chart_data(runs, summary)),
        },
    )


def plan_frame(plan: Plan) -> str:
    """Write the page of a plan as a frame, for notebooks."""
    style = "width: 100%; height: 640px; border: 0"
    return f'<iframe srcdoc="{escape(report_page(plan, simulate(plan)))}" style="{style}"></iframe>'


def fill(name: str, values: dict[str, str]) -> str:
    """Fill the `{{ places }}` of a part."""
    return re.sub(r"\{\{ (\w+) \}\}", lambda place: values[place[1]], _part(name))


def _part(name: str) -> str:
    return (
        files("planner.reporting.page").joinpath("html").joinpath(name).read_text(encoding="utf-8")
    )


def script_json(content: object) -> str:
    """Write JSON in which nothing can end the script element around it or begin a comment."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _chart_data(runs: Sequence[Timeline], summary: Summary) -> dict[str, Any]:
    """Return what the scripts draw, with times as whole numbers of ticks and starts as steps: a
    third of the size.
    """
    first = runs[0]
    workers = shown_workers(first)
    stages = {worker.rank: ", ".join(map(str, worker.stages)) for worker in summary.workers}
    span = max(run.span_s for run in runs)
    digits = 0
    if span > 0:
        digits = max(0, _DIGITS - math.floor(math.log10(span)))
    rows = rows_of(runs, workers)
    return {
        "span_s": span,
        "tick_s": 10.0**-digits,
        "ends": {run.source: run.span_s for run in runs},
        "opening": opening(summary, first, span),
        "steady": [summary.steady_from_s, summary.steady_to_s] if summary.steady else None,
        "microbatches": first.microbatches,
        "pipeline_length": first.pipeline_length,
        "lengths": {
            run.source: {"names": run.length_names, "rows": run.lengths}
            for run in runs
            if run.lengths
        },
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
        "memory": [drawn for rank in workers if (drawn := _memory(runs, rank, digits))],
    }


def _columns(row: Row, source: str, digits: int) -> dict[str, Any]:
    """Write a row's events as columns, starts as steps from the start before."""
    events = row.events
    scale = 10.0**digits
    starts = [round(event.start_s * scale) for event in events]
    ends = [round(event.end_s * scale) for event in events]
    steps = [start - before for before, start in pairwise((0, *starts))]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]

    return {
        "lane": row.lane,
        "source": source,
        "step": steps,
        "length": lengths,
        "kind": _column(KINDS.index(event.kind) for event in events),
        "stage": _column(event.stage for event in events),
        "minibatch": _column(event.minibatch for event in events),
        "microbatch": _column(event.microbatch for event in events),
        "peer": _column(map(_peer, events)),
    }


def _peer(event: Event) -> int:
    """Return the other worker of a message; -1 for an event without one."""
    if event.peer_rank is None:
        return -1
    return event.peer_rank


def _column(values: Iterable[int]) -> list[int] | int:
    """Return the values, or the only value that they have."""
    found = list(values)
    if len(set(found)) != 1:
        return found
    return found[0]


def _memory(runs: Sequence[Timeline], rank: int, digits: int) -> dict[str, Any] | None:
    curves = [(run.source, curve) for run in runs for curve in run.memory if curve.rank == rank]
    if not curves:
        return None
    drawn = [
        {
            "source": source,
            "time_s": [round(s, digits) for s in curve.time_s],
            "held_bytes": list(curve.held_bytes),
        }
        for source, curve in curves
    ]
    return {"rank": rank, "limit_bytes": curves[0][1].limit_bytes, "curves": drawn}


def paragraph(text: str, css: str = "") -> str:
    """Write a paragraph, with a class if there is one."""
    if css:
        return f'<p class="{css}">{escape(text)}</p>'
    return f"<p>{escape(text)}</p>"


def _swatch(text: str, look: str) -> str:
    """Write a legend's item; `look`: the attribute that colours it."""
    return f"<li><i {look}></i>{escape(text)}</li>"


def _folded(title: str, content: str, is_open: bool = False) -> str:
    start = "<details open>" if is_open else "<details>"
    return f"{start}<summary>{escape(title)}</summary>{content}</details>"


def _table(label: str, table: Table) -> str:
    """Draw a table, which scrolls sideways if it is too wide."""
    looks = [_LOOKS[letter] for letter in table.align or "l" * len(table.headers)]

    head = ""
    for name, look in zip(table.headers, looks, strict=True):
        head += f'<th scope="col"{look}>{escape(name)}</th>'

    body = ""
    for row in table.rows:
        body += "<tr>"
        for cell, look in zip(row, looks, strict=True):
            body += f"<td{look}>{escape(str(cell))}</td>"
        body += "</tr>"

    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
    return f"{region}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def figures(plan: Plan, summary: Summary, measured: Summary | None) -> str:
    """Show the numbers that matter most, those of a run first, and what else is predicted."""
    tiles = [
        *_speeds(plan, summary, measured),
        *_speed_up_tiles(plan),
        _bubble_tile(summary),
        *_memory_tiles(summary),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    notes = "".join(paragraph(_as_sentence(note), "note") for note in plan.notes)
    prediction = _table("Prediction", _prediction_table(plan, summary))
    return f'<dl class="figures">{items}</dl>{prediction}{notes}'


def _speed_up_tiles(plan: Plan) -> list[Tile]:
    return [
        (f"over {way}", text, "")
        for way, text in words.speed_ups(plan).items()
        if text.endswith("x")
    ]


def _bubble_tile(summary: Summary) -> Tile:
    more = f"{summary.bubble_share_of_run:.1%} with start-up and drain"
    causes = run_tables.bubble_causes(summary)
    if causes:
        more += f"; waiting for {causes}"
    return "bubble, simulated", f"{summary.bubble_share:.1%}", more


def _memory_tiles(summary: Summary) -> list[Tile]:
    """Return a tile for the fullest worker; none where memory is not known."""
    fullest = max(summary.workers, key=lambda worker: worker.peak_bytes or 0)
    if fullest.peak_bytes is None:
        return []
    limit = "no limit"
    if fullest.limit_bytes is not None:
        limit = f"of {format_memory(fullest.limit_bytes)}"
    return [("fullest worker, predicted", format_bytes(fullest.peak_bytes), limit)]


def _prediction_table(plan: Plan, summary: Summary) -> Table:
    """Tabulate the verdict and what is predicted beside the pace."""
    limits = Limits(*busiest(summary), summary.bubble_share)
    lines: list[tuple[str, str | None]] = [
        ("verdict", verdict(plan, limits)),
        *(("synchronous", synchronous_words(plan, way)) for way in synchronous_ways(plan)),
        ("update", words.update_line(plan)),
        ("gradients", words.staleness_line(plan)),
        *words.prediction_lines(plan, limits)[1:],
    ]
    return Table(["", "predicted"], [line for line in lines if line[1] is not None])


def _as_sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:].removesuffix('.')}."


def _speeds(plan: Plan, summary: Summary, measured: Summary | None) -> list[Tile]:
    """Return the tiles of the speeds: measured, predicted and simulated."""
    predicted = plan.predicted
    tiles = []
    if measured is not None:
        tiles.append(_speed_tile("measured", measured))

    tile = _speed_tile(f"predicted by {predicted.by}", predicted)
    tiles.append(tile)

    # A prediction by simulation is this simulation.
    simulated = _speed_tile("simulated", summary)
    if simulated[1:] != tile[1:]:
        tiles.append(simulated)
    return tiles


def _speed_tile(name: str, run: Summary | Prediction) -> Tile:
    seconds = f"{format_seconds(run.seconds_per_minibatch)} per minibatch"
    if run.samples_per_s is None:
        return name, seconds, ""
    return name, f"{format_rate(run.samples_per_s)} samples/s", seconds


def limits_section(plan: Plan, summary: Summary, explanation: Explanation | None) -> str:
    """Show the busiest resources, predicted and simulated, and what `plan explain` says of them."""
    place, share = busiest(summary)
    text = f"<p>Simulated: <strong>{escape(place)}</strong>, busy {share:.1%} of the time.</p>"
    if explanation is None:
        return text
    # The first sentence names the bottleneck, which stands above.
    said = "".join(map(paragraph, sentences(explanation).splitlines()[1:]))
    title = "Busy times and slack"
    return f"{text}{said}{_folded(title, _table(title, busy_table(explanation)))}"


def stages_section(plan: Plan, source: str) -> str:
    """Tabulate the stages and their memory, and list their layers; `source`: of the profile's
    times, if known.
    """
    few = len(plan.stages) <= MOST_STAGES
    times = _table("Stages", stage_table(plan)) + paragraph(_times_note(plan, source), "note")
    memory = _table("Predicted memory per GPU", memory_table(plan))
    return (
        _folded("Stages, per microbatch", times, few)
        + _folded("Predicted memory per GPU", memory, few)
        + _folded("All layers", _layers_list(plan))
    )


def _times_note(plan: Plan, source: str) -> str:
    """Say what the columns of the stages mean."""
    profile = "profile's"
    if source:
        profile = f"profile's {source}"
    note = f"Times are sums of the {profile} times of layers. {_IN_FLIGHT}"
    if plan.staleness:
        note += _LATE
    return note


def _layers_list(plan: Plan) -> str:
    items = ""
    for number, stage in enumerate(plan.stages):
        names = "".join(f"<li>{escape(name)}</li>" for name in stage.layers)
        items += f"<li>stage {number}<ol>{names}</ol></li>"
    return f'<ul class="layers">{items}</ul>'


def timeline_section(runs: Sequence[Timeline], shown: Sequence[int]) -> dict[str, str]:
    """Describe the timeline's chart, and list its colours; the script draws the rest."""
    simulated = runs[0]
    text = (
        f"{simulated.minibatches} minibatches, {' and '.join(run.source for run in runs)}. Each "
        f"worker has a thick row "
        "for its computations and thin rows for what it sends, receives and all-reduces; where a "
        "thick row is blank, "
        "the worker waits. The shaded part is the simulation's steady state."
    )
    colours = colour_legend(kind for run in runs for kind in run.events.kind)
    swatches = [_swatch(name, f'style="background:{colour}"') for colour, name in colours]
    if len(runs) > 1:
        text += (
            " “Align by minibatch” moves the measured rows so that both runs begin the first "
            "minibatch together."
        )
        swatches += [_swatch(f"mark of {run.source} rows", f'class="{run.source}"') for run in runs]

    if len(shown) < (workers := len(simulated.workers)):
        text += f" {len(shown)} of {workers} workers are shown."
    return {"what": escape(text), "legend": "".join(swatches)}


def restarts_list(run: Timeline) -> str:
    """List what made the run begin again before its minibatches here; "" if nothing did."""
    items = "".join(f"<li>{escape(each)}</li>" for each in run.restarts)
    if not items:
        return ""
    return (
        f"{paragraph('Before these minibatches the workers were started again:')}<ol>{items}</ol>"
    )


def drift_list(run: Timeline) -> str:
    """List where devices and links were not as the plan expects; "" if they were."""
    items = "".join(f"<li>{escape(each)}</li>" for each in run.drift)
    if not items:
        return ""
    title = "While the run went on, its devices and links were not as planned:"
    return f"{paragraph(title)}<ol>{items}</ol>"


def memory_section(summary: Summary, measured: Summary | None) -> str:
    """Frame the chart of memory over time, and tabulate the peaks."""
    warning = ""
    over = [worker.rank for worker in summary.workers if _is_over(worker)]
    if over:
        warning = paragraph(_over_words(over), "warn")

    peaks: Sequence[WorkerUse] = ()
    if measured is not None:
        peaks = measured.workers
    table = run_tables.worker_table(summary.workers, peaks)
    note = paragraph(f"Of computing, sending and receiving: {run_tables.legend(summary)}.", "note")
    few = len(table.rows) <= MOST_STAGES
    return (
        f"{paragraph(_memory_words(measured))}{warning}"
        '<div class="chart" id="memory-chart" role="img" aria-label="Memory of each worker over '
        'time">'
        "<canvas></canvas></div>"
        + _folded("Simulated use of each worker", _table("Workers", table) + note, few)
    )


def _memory_words(measured: Summary | None) -> str:
    """Say what the chart of memory shows."""
    text = "Memory that each worker holds over time, simulated"
    if measured is None:
        pass
    elif any(worker.peak_bytes is not None for worker in measured.workers):
        text += " (filled) and measured (a line)"
    else:
        text += "; the run did not record its memory"
    return f"{text}. The limit is dashed if it is near."


def _is_over(worker: WorkerUse) -> bool:
    """Whether a worker would need more memory than it has."""
    if not worker.peak_bytes or not worker.limit_bytes:
        return False
    return worker.peak_bytes > worker.limit_bytes


def _over_words(ranks: Sequence[int]) -> str:
    workers = "Worker"
    if len(ranks) > 1:
        workers = "Workers"
    listed = ", ".join(map(str, ranks))
    return f"{workers} {listed} would need more memory than there is."


def measured_section(plan: Plan, comparison: RunComparison) -> str:
    """Compare the run with the prediction: pace and stage times."""
    return (
        _table("Predicted and measured", run_tables.pace_table(comparison, plan))
        + paragraph("Mean times of the stages, simulated and measured:")
        + _table("Stage times", run_tables.stage_times_table(comparison))
    )


def comparison_section(comparison: Comparison) -> str:
    """Show the table of `plan compare`."""
    notes = (paragraph(line, "note") for line in comparison_legend(comparison).splitlines())
    return _table("Ways to train", comparison_table(comparison)) + "".join(notes)
