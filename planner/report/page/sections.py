"""The sections of the report as HTML, and the elements that they share. Whatever comes from files is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from planner.analysis.compare import Comparison
from planner.analysis.compare_runs import RunComparison
from planner.analysis.explain import Explanation
from planner.analysis.sweep import Sweep
from planner.formats.plan import Plan
from planner.formats.timeline import EventKind, Timeline
from planner.report.svg.charts import sweep_svg
from planner.report.tables.compare import comparison_legend, comparison_table, sweep_table
from planner.report.tables.explain import explanation_tables, sentences
from planner.report.tables.plan import (
    best_baseline_line,
    bottleneck_place,
    gpus,
    less_or_more,
    over_data_parallel,
    over_one_gpu,
    synchronous_line,
)
from planner.report.tables.runs import (
    PEAK,
    bubble_of_run,
    legend,
    pace_table,
    percent,
    stage_times_table,
    timing_notes,
    timing_table,
    worker_table,
)
from planner.report.tables.stages import memory_table, stage_table
from planner.report.tables.table import Table
from planner.report.timeline import COLOURS, TEXTS, colour_legend
from planner.schedule.instructions import LATE_UPDATES
from planner.simulator.summary import Summary
from planner.units import format_bytes, format_memory, format_rate, format_seconds

Part = tuple[str, float, str]  # what a piece of a bar stands for, its share of the bar's length, its colour
_NUMBER, _CHOSEN = ' class="number"', ' class="chosen"'


def paragraph(text: str, css: str = "") -> str:
    """Write a paragraph, with a class if there is one."""
    attribute = f' class="{css}"' if css else ""
    return f"<p{attribute}>{escape(text)}</p>"


def swatch(text: str, colour: str = "", css: str = "") -> str:
    """Write a legend's item, with its colour or the class that has it."""
    look = f'class="{css}"' if css else f'style="background:{colour}"'
    return f"<li><i {look}></i>{escape(text)}</li>"


def bar(parts: Iterable[Part]) -> str:
    """Draw a bar of parts, grey without a colour; their names show when they are pointed at."""
    pieces = "".join(
        f'<i title="{escape(name)}" style="width:{share:.2%}{colour and f";background:{colour}"}"></i>'
        for name, share, colour in parts
    )
    return f'<div class="bar">{pieces}</div>'


def folded(title: str, content: str, is_open: bool = False) -> str:
    """Put content behind its title, which opens it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def table_html(label: str, table: Table, chosen: int | None = None) -> str:
    """Draw a table, which scrolls sideways if it is too wide; the row `chosen` stands out."""

    def cells(row: Sequence[object], tag: str, attributes: str = "") -> str:
        return "".join(
            f"<{tag}{attributes}{_NUMBER if align == 'r' else ''}>{escape(str(cell))}</{tag}>"
            for cell, align in zip(row, table.align or "l" * len(table.headers), strict=True)
        )

    body = "".join(
        f"<tr{_CHOSEN if number == chosen else ''}>{cells(row, 'td')}</tr>" for number, row in enumerate(table.rows)
    )
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
    head = cells(table.headers, "th", ' scope="col"')
    return f"{region}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


MOST_STAGES = 12  # whose table is open from the start


def figures(plan: Plan, summary: Summary, measured: Summary | None) -> str:
    """Show the numbers that matter most, those of a run first."""
    predicted = plan.predicted
    fullest = max(summary.workers, key=lambda worker: worker.peak_bytes or 0, default=None)
    simulated = _rate(summary.samples_per_s, summary.seconds_per_minibatch)
    shown = [
        *([] if measured is None else [("measured", *_rate(measured.samples_per_s, measured.seconds_per_minibatch))]),
        (f"predicted by {predicted.by}", *_against(predicted.samples_per_s, predicted.seconds_per_minibatch, measured)),
        # A plan that was simulated when it was made predicts what the same simulation finds.
        *(
            []
            if simulated == _rate(predicted.samples_per_s, predicted.seconds_per_minibatch)
            else [("simulated", *_against(summary.samples_per_s, summary.seconds_per_minibatch, measured))]
        ),
        *([("tokens", format_rate(predicted.tokens_per_s), "per second")] if predicted.tokens_per_s else []),
        *([("utilisation", percent(used), "of the GPUs' peak")] if (used := predicted.flop_utilisation) else []),
        ("over one GPU", *_speed_up(over_one_gpu(plan), "")),
        ("over data parallel", *_speed_up(over_data_parallel(plan), f"on {gpus(plan)}")),
        ("gradients", *_late(plan)),
        ("bubble, simulated", percent(summary.bubble_share), bubble_of_run(summary)),
    ]
    if predicted.communication_cut is not None:
        shown.append(("sent", less_or_more(predicted.communication_cut), "than data parallel"))
    if fullest is not None and fullest.peak_bytes is not None:
        limit = "no limit" if fullest.limit_bytes is None else f"of {format_memory(fullest.limit_bytes)}"
        if fullest.limit_bytes is not None and fullest.peak_bytes > fullest.limit_bytes:
            limit += ": does not fit"
        shown.append(("fullest worker, predicted", format_bytes(fullest.peak_bytes), limit))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in shown
    )
    beside = [("Baselines", best_baseline_line(plan)), ("Synchronous", synchronous_line(plan))]
    notes = [f"{name}: {line}" for name, line in beside if line is not None]
    notes = [*notes, *(note[:1].upper() + note[1:] for note in plan.notes)]
    written = "".join(paragraph(f"{note.removesuffix('.')}.", "note") for note in notes)
    return f'<dl class="figures">{items}</dl>{written}'


def _speed_up(text: str, more: str) -> tuple[str, str]:
    """Divide "does not fit (1 GB too many)" in two; a ratio is followed by `more`."""
    value, bracket, rest = text.partition(" (")
    return value, rest.removesuffix(")") if bracket else more


def _late(plan: Plan) -> tuple[str, str]:
    """Write how many updates late the gradients are."""
    if plan.staleness == 0:
        return "none late", "as on one device"
    warning = ": training may not converge" if plan.staleness > LATE_UPDATES else ""
    return f"{plan.staleness} late", f"update{'s' * (plan.staleness > 1)}{warning}"


def _rate(samples_per_s: float | None, seconds: float) -> tuple[str, str]:
    """Write a rate as a number and its unit."""
    if samples_per_s is None:
        return format_seconds(seconds), "per minibatch"
    return format_rate(samples_per_s), f"samples/s, {format_seconds(seconds)} per minibatch"


def _against(samples_per_s: float | None, seconds: float, measured: Summary | None) -> tuple[str, str]:
    """Write a rate, and how far its time per minibatch is from the measured one."""
    value, unit = _rate(samples_per_s, seconds)
    if measured is None:
        return value, unit
    off = seconds / measured.seconds_per_minibatch - 1
    return value, f"{unit}, {abs(off):.1%} {'less' if off < 0 else 'more'} time than measured"


def limits_section(plan: Plan, summary: Summary, explanation: Explanation | None) -> str:
    """Show the busiest resources, predicted and simulated, and what `plan explain` says of them."""
    bottleneck = plan.predicted.bottleneck
    text = (
        f"<p>Predicted: <strong>{escape(bottleneck_place(bottleneck))}</strong>, busy "
        f"{format_seconds(bottleneck.busy_s)} of {format_seconds(plan.predicted.seconds_per_minibatch)} per minibatch. "
        f"Simulated: <strong>{escape(summary.busiest)}</strong>, busy {percent(summary.busiest_share)} of the time.</p>"
    )
    if explanation is None:
        return text
    # The first sentence names the bottleneck, which stands above.
    said = "".join(map(paragraph, sentences(explanation).splitlines()[1:]))
    tables = "".join(folded(title, table_html(title, table)) for title, table in explanation_tables(explanation))
    return f"{text}{said}{tables}"


def stages_section(plan: Plan, source: str) -> str:
    """Draw what a worker of each stage computes, and tabulate the stages and their memory.

    Args:
        source: "measured", "estimated" or "imported", as the profile's times are; empty if that is not known.
    """
    longest_s = max(map(sum, times)) if (times := [_parts_s(plan, number) for number in range(len(plan.stages))]) else 0
    rows = []
    for (_, text), group in groupby(enumerate(times), key=lambda pair: (pair[1], format_seconds(sum(pair[1])))):
        (first, parts), *others = group
        name = f"stages {first}–{others[-1][0]}" if others else f"stage {first}"
        pieces = [
            (f"{TEXTS[kind]} {format_seconds(seconds)}", seconds / longest_s, COLOURS[kind])
            for kind, seconds in zip(_PARTS, parts, strict=True)
            if seconds
        ]
        rows.append(f"<span>{name}</span>{bar(pieces)}<b>{text}</b>")
    shown = [kind for place, kind in enumerate(_PARTS) if any(parts[place] for parts in times)]
    colours = "".join(swatch(TEXTS[kind], COLOURS[kind]) for kind in shown)
    listed = "".join(
        f"<li>stage {number}<ol>{''.join(f'<li>{escape(name)}</li>' for name in stage.layers)}</ol></li>"
        for number, stage in enumerate(plan.stages)
    )
    few = len(plan.stages) <= MOST_STAGES
    legend_text = _IN_FLIGHT + (_LATE if plan.staleness else "")
    return (
        paragraph(
            f"What a worker of each stage computes per minibatch, by the profile's {source} times of layers:".replace(
                "  ", " "
            )
        )
        + f'<ul class="legend">{colours}</ul><div class="busy">{"".join(rows)}</div>'
        + folded(
            "Stages, per microbatch", table_html("Stages", stage_table(plan)) + paragraph(legend_text, "note"), few
        )
        + folded("Predicted memory per GPU", table_html("Predicted memory per GPU", memory_table(plan)), few)
        + folded("All layers", f'<ul class="layers">{listed}</ul>')
    )


_PARTS: tuple[EventKind, ...] = ("forward", "recompute", "backward", "update")
_IN_FLIGHT = "In flight: microbatches, or undivided minibatches, whose activations a worker holds at once."
_LATE = " Late: updates between the weights that a gradient was computed with and those that it changes."


def _parts_s(plan: Plan, number: int) -> tuple[float, ...]:
    """Return the seconds per minibatch that each worker of a stage takes for the parts."""
    stage = plan.stages[number]
    share = plan.microbatches / stage.replicas
    adding_s = stage.accumulate_s * max(0, plan.microbatches - stage.replicas) / stage.replicas
    update_s = stage.update_s if plan.schedule.divides else stage.update_s / stage.replicas
    return share * stage.forward_s, share * stage.again_s, share * stage.backward_s + adding_s, update_s


def timeline_section(simulated: Timeline, runs: Sequence[Timeline], shown: Sequence[int]) -> dict[str, str]:
    """Describe the timeline's chart, and list its colours; the script draws the rest."""
    text = (
        f"{simulated.minibatches} minibatches, {' and '.join(run.source for run in runs)}. Each worker has a thick row "
        "for its computations and thin rows for what it sends, receives and all-reduces; where a thick row is blank, "
        "the worker waits. The shaded part is the simulation's steady state."
    )
    if len(runs) > 1:
        text += (
            " The measured rows are moved so that both runs begin the first minibatch on show together, unless "
            "“Align by minibatch” is off."
        )
    if len(shown) < (workers := len(simulated.workers)):
        text += f" {len(shown)} of {workers} workers are shown."
    colours = colour_legend(kind for run in runs for kind in run.events.kind)
    swatches = [swatch(name, colour) for colour, name in colours]
    if len(runs) > 1:
        swatches += [swatch(f"mark of {run.source} rows", css=run.source) for run in runs]
    return {"what": escape(text), "legend": "".join(swatches)}


def memory_section(plan: Plan, summary: Summary, measured: Summary | None) -> str:
    """Frame the chart of memory over time, and tabulate the peaks."""
    cluster = plan.cluster
    recorded = measured is not None and any(worker.peak_bytes is not None for worker in measured.workers)
    text = "Memory that each worker holds over time, simulated"
    if measured is not None:
        text += " (filled) and measured (a line)" if recorded else "; the run did not record its memory"
    limits = {cluster.kinds_on([ranks.start]): cluster.memory_on([ranks.start]) for ranks in cluster.kind_ranks}
    limits = limits or {"": cluster.memory_bytes}
    words = [f"{format_memory(limit)}{kind and f' on {kind}'}" for kind, limit in limits.items() if limit is not None]
    text += f". The limit is {', '.join(words)}, dashed if it is near." if words else ". There is no limit."
    table = worker_table(summary.workers)
    if measured is not None and recorded:
        peaks = [row[PEAK] for row in worker_table(measured.workers).rows]
        rows = [[*row, peak] for row, peak in zip(table.rows, peaks, strict=True)]
        table = Table([*table.headers, "measured peak"], rows, f"{table.align}r")
    note, few = f"Of computing, sending and receiving: {legend(summary)}.", len(table.rows) <= MOST_STAGES
    over = [w.rank for w in summary.workers if w.peak_bytes and w.limit_bytes and w.peak_bytes > w.limit_bytes]
    too_full = f"Worker{'s' * (len(over) > 1)} {', '.join(map(str, over))} would need more memory than there is."
    return (
        f"{paragraph(text)}{paragraph(too_full, 'warn') if over else ''}"
        '<div class="chart" id="memory-chart" role="img" aria-label="Memory of each worker over time">'
        "<canvas></canvas></div>"
        + folded("Simulated use of each worker", table_html("Workers", table) + paragraph(note, "note"), few)
    )


def measured_section(plan: Plan, comparison: RunComparison) -> str:
    """Compare the run with the prediction: pace, timing errors of events, and stage times."""
    distances, rows = timing_notes(comparison)
    return (
        table_html("Predicted and measured", pace_table(comparison, plan))
        + paragraph(f"{distances} {rows}")
        + table_html("Timing errors", timing_table(comparison))
        + paragraph("Mean times of the stages, simulated and measured:")
        + table_html("Stage times", stage_times_table(comparison))
    )


def comparison_section(comparison: Comparison) -> str:
    """Show the table of `plan compare`."""
    notes = (paragraph(line, "note") for line in comparison_legend(comparison).splitlines())
    return table_html("Ways to train", comparison_table(comparison), chosen=0) + "".join(notes)


def sweep_section(sweep: Sweep) -> str:
    """Show the picture and the table of `plan sweep`."""
    table = table_html("Plans by bandwidth", sweep_table(sweep))
    return (
        '<figure class="scroll" tabindex="0" role="img" aria-label="Speed of the plans by bandwidth">'
        f"{sweep_svg(sweep)}</figure>{folded('As a table', table)}"
    )
