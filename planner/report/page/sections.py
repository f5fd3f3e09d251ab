"""The sections of the report as HTML. Whatever comes from files is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planner.analysis.compare import Comparison
from planner.analysis.compare_runs import RunComparison
from planner.analysis.sweep import Sweep
from planner.formats.plan import Plan, Stage
from planner.formats.timeline import EventKind, Timeline
from planner.report.page.elements import Part, bar, paragraph, swatch, table_html
from planner.report.svg.lanes import COLOURS, TEXTS, colour_legend
from planner.report.svg.sweep import sweep_svg
from planner.report.tables.compare import comparison_legend, comparison_table
from planner.report.tables.compare_runs import pace_table, stage_times_table, timing_notes, timing_table
from planner.report.tables.plan import (
    bottleneck_place,
    gpus,
    less_or_more,
    ranks_line,
    recomputing,
    sent_bytes,
)
from planner.report.tables.repeats import layer_range
from planner.report.tables.run import PEAK, bubble_of_run, legend, percent, worker_table
from planner.report.tables.sweep import sweep_table
from planner.report.tables.table import Table
from planner.report.tables.ways import best_baseline_line, over_data_parallel, over_one_gpu, synchronous_line
from planner.schedule.defaults import LATE_UPDATES
from planner.simulator.summary import Summary, WorkerUse
from planner.units import format_bytes, format_rate, format_seconds

MOST_BARS = 24
_MEMORY_COLOURS = ("#0072b2", "#b84f00", "#007a5a", "#6a60c4", "#c87420", "#b0447d", "#8a6100", "#3b8fc4")


def figures(plan: Plan, summary: Summary) -> str:
    """Show the numbers that matter most."""
    predicted = plan.predicted
    fullest = max(summary.workers, key=lambda worker: worker.peak_bytes or 0, default=None)
    shown = [
        ("predicted", *_rate(predicted.samples_per_s, predicted.seconds_per_minibatch)),
        ("simulated", *_rate(summary.samples_per_s, summary.seconds_per_minibatch)),
        *([("tokens", format_rate(predicted.tokens_per_s), "per second")] if predicted.tokens_per_s else []),
        *([("utilisation", percent(used), "of the GPUs' peak")] if (used := predicted.flop_utilisation) else []),
        ("over one GPU", *_speed_up(over_one_gpu(plan), "")),
        ("over data parallel", *_speed_up(over_data_parallel(plan), f"on {gpus(plan)}")),
        ("gradients", *_late(plan)),
        ("bubble", percent(summary.bubble_share), bubble_of_run(summary)),
    ]
    if predicted.communication_cut is not None:
        shown.append(("sent", less_or_more(predicted.communication_cut), "than data parallel"))
    if fullest is not None and fullest.peak_bytes is not None:
        limit = "no limit" if fullest.limit_bytes is None else f"of {format_bytes(fullest.limit_bytes)}"
        shown.append(("fullest worker", format_bytes(fullest.peak_bytes), limit))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in shown
    )
    beside = [("Baselines", best_baseline_line(plan)), ("Synchronous", synchronous_line(plan))]
    notes = "".join(paragraph(f"{name}: {line}.", "note") for name, line in beside if line is not None)
    return f'<dl class="figures">{items}</dl>{notes}'


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


def limits_section(plan: Plan, summary: Summary) -> str:
    """Show the busiest resources, predicted and simulated."""
    bottleneck = plan.predicted.bottleneck
    text = (
        f"<p>Predicted: <strong>{escape(bottleneck_place(bottleneck))}</strong>, busy "
        f"{format_seconds(bottleneck.busy_s)} of {format_seconds(plan.predicted.seconds_per_minibatch)} per minibatch. "
        f"Simulated: <strong>{escape(summary.busiest)}</strong>, busy {percent(summary.busiest_share)} of the time.</p>"
    )
    shares, note = _shares(summary), legend(summary)
    note = f"{note[:1].upper()}{note[1:]}."
    if len(shares) > MOST_BARS:
        note += f" The {MOST_BARS} busiest of {len(shares)}."
        shares = sorted(shares, key=lambda share: -share[1])[:MOST_BARS]
    bars = "".join(
        f'<span>{escape(name)}</span><span class="bar"><i style="width:{share:.1%};background:{colour}"></i></span>'
        f"<b>{share:.0%}</b>"
        for name, share, colour in shares
    )
    return f'{text}{paragraph(note, "note")}<div class="busy">{bars}</div>'


def _shares(summary: Summary) -> list[Part]:
    """List the busy shares of each stage's busiest replica, and of each shared link."""
    stages: dict[tuple[int, ...], list[WorkerUse]] = {}
    for worker in summary.workers:
        stages.setdefault(worker.stages, []).append(worker)
    found: list[Part] = []
    for numbers, group in stages.items():
        name = f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        found += [
            (f"{name} computes", max(worker.compute_share for worker in group), COLOURS["forward"]),
            (f"{name} sends", max(worker.send_share for worker in group), COLOURS["send_gradient"]),
            (f"{name} receives", max(worker.receive_share for worker in group), COLOURS["backward_weight"]),
        ]
    return found + [(link.name, link.busy_share, COLOURS["all_reduce"]) for link in summary.shared_links]


def stages_section(plan: Plan) -> str:
    """Show a card per stage: its layers, its times, its memory."""
    longest_s = max(stage.compute_s for stage in plan.stages)
    cards = "".join(_card(plan, number, longest_s) for number in range(len(plan.stages)))
    kinds = [kind for kind in _PARTS if kind != "recompute" or any(stage.recompute for stage in plan.stages)]
    colours = "".join(swatch(TEXTS[kind], COLOURS[kind]) for kind in kinds)
    return f'<ul class="legend">{colours}</ul><ul class="stages">{cards}</ul>'


_PARTS: tuple[EventKind, ...] = ("forward", "recompute", "backward", "update")


def _card(plan: Plan, number: int, longest_s: float) -> str:
    stage = plan.stages[number]
    recompute_s = stage.again_s
    times = zip(_PARTS, (stage.forward_s, recompute_s, stage.backward_s, stage.update_s), strict=True)
    compute_bar = bar(
        (f"{TEXTS[kind]} {format_seconds(seconds)}", seconds / longest_s if longest_s else 0.0, COLOURS[kind])
        for kind, seconds in times
        if seconds
    )
    activations, gradients = map(format_bytes, sent_bytes(plan, number))
    many = "s" * (stage.replicas > 1)
    again = recomputing(stage)
    lines = [
        f"{stage.replicas} replica{many}: worker{many} {ranks_line(stage)}",
        f"{stage.in_flight} in flight",
        f"{format_seconds(stage.compute_s)} per microbatch{f', recomputes {again}' if again else ''}",
        f"sends {activations} of activations, {gradients} of gradients",
    ]
    if stage.sharded:
        lines.append(f"each replica has 1/{stage.replicas} of the optimizer's state")
    if plan.microbatches > 1 and stage.accumulate_s:
        accumulation = format_seconds(stage.accumulate_s)
        lines.insert(3, f"{accumulation} of gradient accumulation, except for a minibatch's first microbatch")
    layers = "".join(f"<li>{escape(name)}</li>" for name in stage.layers)
    return (
        f"<li><h3>Stage {number}</h3>{compute_bar}{''.join(map(paragraph, lines))}{_memory_bar(stage)}"
        f"<details><summary>{escape(layer_range(stage.layers))}</summary><ol>{layers}</ol></details></li>"
    )


def _memory_bar(stage: Stage) -> str:
    """Show what a stage's memory is used for, each part with its name."""
    total = stage.memory.total_bytes
    sizes = {name: size for name, size in stage.memory.model_dump().items() if size > 0}
    parts = [
        (f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(size)}", size / total, colour)
        for (name, size), colour in zip(sizes.items(), _MEMORY_COLOURS, strict=False)
    ]
    text = ", ".join(
        f'<span class="part"><i style="background:{colour}"></i>{escape(name)}</span>' for name, _, colour in parts
    )
    return f"<p>memory {format_bytes(total)}{': ' if text else ''}{text}</p>{bar(parts)}"


def timeline_section(simulated: Timeline, runs: Sequence[Timeline], shown: Sequence[int]) -> dict[str, str]:
    """Describe the timeline's chart, and list its colours; the script draws the rest."""
    text = (
        f"{simulated.minibatches} minibatches, {' and '.join(run.source for run in runs)}. Each worker has a thick row "
        "for its computations and thin rows for what it sends, receives and all-reduces. The shaded part is the steady "
        "state."
    )
    if len(shown) < (workers := len(simulated.workers)):
        text += f" {len(shown)} of {workers} workers are shown."
    colours = colour_legend(kind for run in runs for kind in run.events.kind)
    return {"what": escape(text), "legend": "".join(swatch(name, colour) for colour, name in colours)}


def memory_section(plan: Plan, summary: Summary, measured: Summary | None) -> str:
    """Frame the chart of memory over time, and tabulate the peaks."""
    limit = plan.cluster.memory_bytes
    text = "Memory that each worker holds over time, simulated"
    text += ". " if measured is None else "; measured memory has another colour. "
    text += "There is no limit." if limit is None else f"The limit is {format_bytes(limit)}, dashed if it is near."
    table = worker_table(summary.workers)
    if measured is not None and any(worker.peak_bytes is not None for worker in measured.workers):
        peaks = [row[PEAK] for row in worker_table(measured.workers).rows]
        rows = [[*row, peak] for row, peak in zip(table.rows, peaks, strict=True)]
        table = Table([*table.headers, "measured peak"], rows, f"{table.align}r")
    over = [w.rank for w in summary.workers if w.peak_bytes and w.limit_bytes and w.peak_bytes > w.limit_bytes]
    too_full = f"Worker{'s' * (len(over) > 1)} {', '.join(map(str, over))} would need more memory than there is."
    return (
        f"{paragraph(text)}{paragraph(too_full, 'warn') if over else ''}"
        '<div class="chart" id="memory-chart" role="img" aria-label="Memory of each worker over time">'
        f"<canvas></canvas></div>{table_html('Workers', table)}"
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
        f'<figure class="scroll" tabindex="0">{sweep_svg(sweep)}</figure>'
        f"<details><summary>As a table</summary>{table}</details>"
    )
