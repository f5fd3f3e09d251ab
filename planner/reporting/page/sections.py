"""The sections of the report as HTML, and the elements that they share. Whatever comes from files is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from planner.analysis.compare import Comparison
from planner.analysis.compare_runs import RunComparison
from planner.analysis.explain import Explanation
from planner.analysis.sweep import Sweep
from planner.formats.plan import Plan
from planner.formats.timeline import EventKind, Timeline
from planner.reporting.svg import sweep_svg
from planner.reporting.tables.compare import comparison_legend, comparison_table, sweep_table
from planner.reporting.tables.explain import explanation_tables, sentences
from planner.reporting.tables.plan import (
    bottleneck_place,
    gpus,
    over_data_parallel,
    over_one_gpu,
    prediction_lines,
    staleness_line,
)
from planner.reporting.tables.runs import (
    bubble_of_run,
    legend,
    pace_table,
    percent,
    stage_times_table,
    timing_notes,
    timing_table,
    worker_table,
)
from planner.reporting.tables.stages import memory_table, stage_table
from planner.reporting.tables.table import Table
from planner.reporting.timeline import COLOURS, TEXTS, colour_legend
from planner.simulator.summary import Summary
from planner.units import format_bytes, format_memory, format_rate, format_seconds

MOST_STAGES = 12  # whose table is open from the start
_PARTS: tuple[EventKind, ...] = ("forward", "recompute", "backward", "update")
_IN_FLIGHT = "In flight: microbatches, or undivided minibatches, whose activations a worker holds at once."
_LATE = " Late: updates between the weights that a gradient was computed with and those that it changes."


def paragraph(text: str, css: str = "") -> str:
    """Write a paragraph, with a class if there is one."""
    attribute = f' class="{css}"' if css else ""
    return f"<p{attribute}>{escape(text)}</p>"


def _swatch(text: str, look: str) -> str:
    """Write a legend's item; `look`: the attribute that colours it."""
    return f"<li><i {look}></i>{escape(text)}</li>"


def _folded(title: str, content: str, is_open: bool = False) -> str:
    """Put content behind its title, which opens it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def _table(label: str, table: Table, chosen: int | None = None) -> str:
    """Draw a table, which scrolls sideways if it is too wide; the row `chosen` stands out."""
    css = [' class="number"' if letter == "r" else "" for letter in table.align or "l" * len(table.headers)]
    head = "".join(f'<th scope="col"{look}>{escape(name)}</th>' for name, look in zip(table.headers, css, strict=True))
    body = []
    for number, row in enumerate(table.rows):
        cells = "".join(f"<td{look}>{escape(str(cell))}</td>" for cell, look in zip(row, css, strict=True))
        body.append(f'<tr class="chosen">{cells}</tr>' if number == chosen else f"<tr>{cells}</tr>")
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
    return f"{region}<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def figures(plan: Plan, summary: Summary, measured: Summary | None) -> str:
    """Show the numbers that matter most, those of a run first, and what else is predicted."""
    predicted = plan.predicted
    runs = {"measured": measured, f"predicted by {predicted.by}": predicted, "simulated": summary}
    paces = {name: _rate(run.samples_per_s, run.seconds_per_minibatch) for name, run in runs.items() if run is not None}
    if paces["simulated"] == paces[f"predicted by {predicted.by}"]:
        del paces["simulated"]
    tiles = [(name, *rate) for name, rate in paces.items()]
    speed_ups = (
        ("over one GPU", over_one_gpu(plan), ""),
        ("over data parallel", over_data_parallel(plan), f"on {gpus(plan.cluster.gpus)}"),
    )
    tiles += [tile for tile in speed_ups if tile[1].endswith("x")]
    tiles.append(("bubble, simulated", percent(summary.bubble_share), bubble_of_run(summary)))
    fullest = max(summary.workers, key=lambda worker: worker.peak_bytes or 0)
    if fullest.peak_bytes is not None:
        limit = "no limit" if fullest.limit_bytes is None else f"of {format_memory(fullest.limit_bytes)}"
        if fullest.limit_bytes is not None and fullest.peak_bytes > fullest.limit_bytes:
            limit += ": does not fit"
        tiles.append(("fullest worker, predicted", format_bytes(fullest.peak_bytes), limit))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    lines = [("gradients", staleness_line(plan)), *prediction_lines(plan)[1:]]
    rows = [line for line in lines if line[1] is not None]
    notes = "".join(paragraph(f"{note[:1].upper()}{note[1:].removesuffix('.')}.", "note") for note in plan.notes)
    return f'<dl class="figures">{items}</dl>{_table("Prediction", Table(["", "predicted"], rows))}{notes}'


def _rate(samples_per_s: float | None, seconds: float) -> tuple[str, str]:
    """Write a rate as a number and its unit."""
    if samples_per_s is None:
        return format_seconds(seconds), "per minibatch"
    return format_rate(samples_per_s), f"samples/s, {format_seconds(seconds)} per minibatch"


def limits_section(plan: Plan, summary: Summary, explanation: Explanation | None) -> str:
    """Show the busiest resources, predicted and simulated, and what `plan explain` says of them."""
    limit = plan.predicted.bottleneck
    text = (
        f"<p>By the cost model: <strong>{escape(bottleneck_place(limit))}</strong>, {format_seconds(limit.busy_s)} of "
        f"{format_seconds(plan.predicted.seconds_per_minibatch)} per minibatch. "
        f"Simulated: <strong>{escape(summary.busiest)}</strong>, busy {percent(summary.busiest_share)} of the time.</p>"
    )
    if explanation is None:
        return text
    # The first sentence names the bottleneck, which stands above.
    said = "".join(map(paragraph, sentences(explanation).splitlines()[1:]))
    tables = "".join(_folded(title, _table(title, table)) for title, table in explanation_tables(explanation))
    return f"{text}{said}{tables}"


def stages_section(plan: Plan, source: str) -> str:
    """Draw what a worker of each stage computes, and tabulate the stages and their memory.

    Args:
        plan: with the stages.
        source: "measured", "estimated" or "imported", as the profile's times are; empty if that is not known.
    """
    times = [_parts_s(plan, number) for number in range(len(plan.stages))]
    longest_s = max(map(sum, times))
    rows = []
    for (parts, total), group in groupby(range(len(times)), lambda n: (times[n], format_seconds(sum(times[n])))):
        first, *others = group
        name = f"stages {first}–{others[-1]}" if others else f"stage {first}"
        pieces = "".join(
            f'<i title="{TEXTS[kind]} {format_seconds(seconds)}" '
            f'style="width:{seconds / longest_s:.2%};background:{COLOURS[kind]}"></i>'
            for kind, seconds in zip(_PARTS, parts, strict=True)
            if seconds
        )
        rows.append(f'<span>{name}</span><div class="bar">{pieces}</div><b>{total}</b>')
    shown = [kind for place, kind in enumerate(_PARTS) if any(parts[place] for parts in times)]
    colours = "".join(_swatch(TEXTS[kind], f'style="background:{COLOURS[kind]}"') for kind in shown)
    layers = "".join(
        f"<li>stage {number}<ol>{''.join(f'<li>{escape(name)}</li>' for name in stage.layers)}</ol></li>"
        for number, stage in enumerate(plan.stages)
    )
    few = len(plan.stages) <= MOST_STAGES
    note = paragraph(_IN_FLIGHT + (_LATE if plan.staleness else ""), "note")
    text = f"What a worker of each stage computes per minibatch, by the profile's {source} times of layers:"
    return (
        paragraph(text.replace("  ", " "))
        + f'<ul class="legend">{colours}</ul><div class="busy">{"".join(rows)}</div>'
        + _folded("Stages, per microbatch", _table("Stages", stage_table(plan)) + note, few)
        + _folded("Predicted memory per GPU", _table("Predicted memory per GPU", memory_table(plan)), few)
        + _folded("All layers", f'<ul class="layers">{layers}</ul>')
    )


def _parts_s(plan: Plan, number: int) -> tuple[float, ...]:
    """Return the seconds per minibatch that each worker of a stage takes for the parts."""
    stage = plan.stages[number]
    share = plan.microbatches / stage.replicas
    adding_s = stage.accumulate_s * max(0, plan.microbatches - stage.replicas) / stage.replicas
    update_s = stage.update_s if plan.schedule.divides else stage.update_s / stage.replicas
    return share * stage.forward_s, share * stage.again_s, share * stage.backward_s + adding_s, update_s


def timeline_section(runs: Sequence[Timeline], shown: Sequence[int]) -> dict[str, str]:
    """Describe the timeline's chart, and list its colours; the script draws the rest."""
    simulated = runs[0]
    text = (
        f"{simulated.minibatches} minibatches, {' and '.join(run.source for run in runs)}. Each worker has a thick row "
        "for its computations and thin rows for what it sends, receives and all-reduces; where a thick row is blank, "
        "the worker waits. The shaded part is the simulation's steady state."
    )
    colours = colour_legend(kind for run in runs for kind in run.events.kind)
    swatches = [_swatch(name, f'style="background:{colour}"') for colour, name in colours]
    if len(runs) > 1:
        text += (
            " The measured rows are moved so that both runs begin the first minibatch on show together, unless "
            "“Align by minibatch” is off."
        )
        swatches += [_swatch(f"mark of {run.source} rows", f'class="{run.source}"') for run in runs]
    if len(shown) < (workers := len(simulated.workers)):
        text += f" {len(shown)} of {workers} workers are shown."
    return {"what": escape(text), "legend": "".join(swatches)}


def memory_section(plan: Plan, summary: Summary, measured: Summary | None) -> str:
    """Frame the chart of memory over time, and tabulate the peaks."""
    cluster = plan.cluster
    text = "Memory that each worker holds over time, simulated"
    if measured is not None:
        recorded = any(worker.peak_bytes is not None for worker in measured.workers)
        text += " (filled) and measured (a line)" if recorded else "; the run did not record its memory"
    limits = {cluster.kinds_on([ranks.start]): cluster.memory_on([ranks.start]) for ranks in cluster.kind_ranks}
    limits = limits or {"": cluster.memory_bytes}
    words = [f"{format_memory(limit)}{kind and f' on {kind}'}" for kind, limit in limits.items() if limit is not None]
    text += f". The limit is {', '.join(words)}, dashed if it is near." if words else ". There is no limit."
    over = [w.rank for w in summary.workers if w.peak_bytes and w.limit_bytes and w.peak_bytes > w.limit_bytes]
    too_full = f"Worker{'s' * (len(over) > 1)} {', '.join(map(str, over))} would need more memory than there is."
    table = worker_table(summary.workers, measured.workers if measured is not None else ())
    note = paragraph(f"Of computing, sending and receiving: {legend(summary)}.", "note")
    return (
        f"{paragraph(text)}{paragraph(too_full, 'warn') if over else ''}"
        '<div class="chart" id="memory-chart" role="img" aria-label="Memory of each worker over time">'
        "<canvas></canvas></div>"
        + _folded("Simulated use of each worker", _table("Workers", table) + note, len(table.rows) <= MOST_STAGES)
    )


def measured_section(plan: Plan, comparison: RunComparison) -> str:
    """Compare the run with the prediction: pace, timing errors of events, and stage times."""
    return (
        _table("Predicted and measured", pace_table(comparison, plan))
        + paragraph(" ".join(timing_notes(comparison)))
        + _table("Timing errors", timing_table(comparison))
        + paragraph("Mean times of the stages, simulated and measured:")
        + _table("Stage times", stage_times_table(comparison))
    )


def comparison_section(comparison: Comparison) -> str:
    """Show the table of `plan compare`."""
    notes = (paragraph(line, "note") for line in comparison_legend(comparison).splitlines())
    return _table("Ways to train", comparison_table(comparison), chosen=0) + "".join(notes)


def sweep_section(sweep: Sweep) -> str:
    """Show the picture and the table of `plan sweep`."""
    table = _folded("As a table", _table("Plans by bandwidth", sweep_table(sweep)))
    label = "Speed of the plans by bandwidth"
    return f'<figure class="scroll" tabindex="0" role="img" aria-label="{label}">{sweep_svg(sweep)}</figure>{table}'
