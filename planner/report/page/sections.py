"""The report's sections as HTML. Whatever comes from files is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from planner.analysis.compare import Comparison
from planner.analysis.compare_runs import Against
from planner.analysis.sweep import Sweep
from planner.formats.plan import Plan, Stage
from planner.formats.timeline import LANES, Kind, Timeline
from planner.report.svg.lanes import COLOURS, LANE_ORDER, TEXTS
from planner.report.svg.sweep import sweep_svg
from planner.report.tables.compare import comparison_cells, comparison_legend
from planner.report.tables.compare_runs import APART_HEADERS, STAGE_HEADERS, apart_cells, pace_cells, stage_cells
from planner.report.tables.plan import RESOURCES, gpus, layer_range, ranks_line
from planner.report.tables.run import legend, percent, worker_cells
from planner.report.tables.sweep import sweep_cells
from planner.simulator.summary import Summary, WorkerUse
from planner.units import format_bytes, format_rate, format_seconds

MOST_BARS = 24
_MEMORY_COLOURS = ("#0072b2", "#b84f00", "#007a5a", "#6a60c4", "#c87420", "#b0447d", "#8a6100", "#3b8fc4")


def figures(plan: Plan, summary: Summary) -> str:
    """The numbers that matter most."""
    predicted, peak = plan.predicted, _fullest(summary.workers)
    shown = [
        ("predicted", *_rate(predicted.samples_per_s, predicted.seconds_per_minibatch)),
        ("simulated", *_rate(summary.samples_per_s, summary.seconds_per_minibatch)),
        ("over one GPU", f"{predicted.speedup_over_one_gpu:.2f}x", ""),
        ("over data parallel", f"{predicted.speedup_over_data_parallel:.2f}x", f"on {gpus(plan)}"),
        ("bubble", percent(summary.bubble_share), f"{percent(summary.bubble_share_of_run)} with start-up and drain"),
    ]
    if predicted.communication_cut is not None:
        cut = predicted.communication_cut
        shown.append(("sent", f"{abs(cut):.0%} {'less' if cut >= 0 else 'more'}", "than data parallel"))
    if peak is not None and peak.peak_bytes is not None:
        limit = "no limit" if peak.limit_bytes is None else f"of {format_bytes(peak.limit_bytes)}"
        shown.append(("fullest worker", format_bytes(peak.peak_bytes), limit))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in shown
    )
    return f'<dl class="figures">{items}</dl>'


def _rate(samples_per_s: float | None, seconds: float) -> tuple[str, str]:
    """A number, and what it is of."""
    if samples_per_s is None:
        return format_seconds(seconds), "per minibatch"
    return format_rate(samples_per_s), f"samples/s, {format_seconds(seconds)} per minibatch"


def _fullest(workers: Iterable[WorkerUse]) -> WorkerUse | None:
    return max(workers, key=lambda worker: worker.peak_bytes or 0, default=None)


def limits_section(plan: Plan, summary: Summary) -> str:
    """The busiest resources, predicted and simulated."""
    bottleneck = plan.predicted.bottleneck
    place = RESOURCES[bottleneck.resource].format(stage=bottleneck.stage)
    note = legend(summary)
    text = (
        f"<p>Predicted: <strong>{escape(place)}</strong>, busy {format_seconds(bottleneck.busy_s)} of "
        f"{format_seconds(plan.predicted.seconds_per_minibatch)} per minibatch. Simulated: "
        f"<strong>{escape(summary.busiest)}</strong>, busy {percent(summary.busiest_share)} of the time.</p>"
    )
    shares = _shares(summary)
    some = f" The {MOST_BARS} busiest of {len(shares)}." if len(shares) > MOST_BARS else ""
    shares = sorted(shares, key=lambda share: -share[1])[:MOST_BARS] if some else shares
    bars = "".join(
        f'<span>{escape(name)}</span><span class="bar"><i style="width:{share:.1%};background:{colour}"></i></span>'
        f"<b>{share:.0%}</b>"
        for name, share, colour in shares
    )
    note = f'<p class="note">{escape(note[:1].upper() + note[1:])}.{some}</p>'
    return f'{text}{note}<div class="busy">{bars}</div>'


def _shares(summary: Summary) -> list[tuple[str, float, str]]:
    """Of every stage the busiest replica's, and of every shared link."""
    stages: dict[tuple[int, ...], list[WorkerUse]] = {}
    for worker in summary.workers:
        stages.setdefault(worker.stages, []).append(worker)
    found = []
    for numbers, group in stages.items():
        name = f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        found += [
            (f"{name} computes", max(worker.compute_share for worker in group), COLOURS["forward"]),
            (f"{name} sends", max(worker.send_share for worker in group), COLOURS["send_gradient"]),
            (f"{name} receives", max(worker.receive_share for worker in group), COLOURS["backward_weight"]),
        ]
    return found + [(link.name, link.busy_share, COLOURS["all_reduce"]) for link in summary.shared_links]


def stages_section(plan: Plan) -> str:
    """A card per stage: its layers, its times, its memory."""
    longest = max(stage.compute_s for stage in plan.stages)
    cards = "".join(_card(plan, number, stage, longest) for number, stage in enumerate(plan.stages))
    some = any(stage.recompute for stage in plan.stages)
    kinds: tuple[Kind, ...] = ("forward", *(("recompute",) if some else ()), "backward", "update")
    colours = "".join(_swatch(TEXTS[kind], COLOURS[kind]) for kind in kinds)
    return f'<ul class="legend">{colours}</ul><ul class="stages">{cards}</ul>'


def _swatch(text: str, colour: str) -> str:
    return f'<li><i style="background:{colour}"></i>{escape(text)}</li>'


def _card(plan: Plan, number: int, stage: Stage, longest_s: float) -> str:
    again = stage.forward_s if stage.recompute else 0.0
    parts: list[tuple[Kind, float]] = [
        ("forward", stage.forward_s),
        ("recompute", again),
        ("backward", stage.backward_s),
        ("update", stage.update_s),
    ]
    bar = "".join(
        f'<i title="{TEXTS[kind]} {format_seconds(seconds)}" '
        f'style="width:{seconds / longest_s if longest_s else 0:.2%};background:{COLOURS[kind]}"></i>'
        for kind, seconds in parts
        if seconds
    )
    layers = "".join(f"<li>{escape(name)}</li>" for name in stage.layers)
    sent = sum(transfer.output_bytes for transfer in plan.transfers if transfer.source == number)
    returned = sum(transfer.gradient_bytes for transfer in plan.transfers if transfer.target == number)
    many = "s" * (stage.replicas > 1)
    lines = [
        f"{stage.replicas} replica{many}: worker{many} {ranks_line(stage)}",
        f"{stage.in_flight} in flight",
        f"{format_seconds(stage.compute_s)} per microbatch{', recomputes' if stage.recompute else ''}",
        f"sends {format_bytes(sent)} on, {format_bytes(returned)} back",
    ]
    if plan.microbatches > 1 and stage.accumulate_s:
        lines.insert(3, f"{format_seconds(stage.accumulate_s)} more to add gradients up, all but a minibatch's first")
    return (
        f'<li><h3>Stage {number}</h3><div class="bar">{bar}</div>'
        + "".join(f"<p>{escape(line)}</p>" for line in lines)
        + _memory_bar(stage)
        + f"<details><summary>{escape(layer_range(stage.layers))}</summary><ol>{layers}</ol></details></li>"
    )


def _memory_bar(stage: Stage) -> str:
    """What its memory is for, each part with its name."""
    parts = [(name.removesuffix("_bytes"), size) for name, size in stage.memory.model_dump().items() if size > 0]
    total = stage.memory.total_bytes
    colours = _MEMORY_COLOURS * 2
    text = ", ".join(
        f'<span class="part"><i style="background:{colour}"></i>'
        f"{escape(name.replace('_', ' '))} {format_bytes(size)}</span>"
        for (name, size), colour in zip(parts, colours, strict=False)
    )
    bar = "".join(
        f'<i title="{escape(name)} {format_bytes(size)}" style="width:{size / total:.2%};background:{colour}"></i>'
        for (name, size), colour in zip(parts, colours, strict=False)
    )
    whole = f"memory {format_bytes(total)}" + (f": {text}" if text else "")
    return f'<p>{whole}</p><div class="bar">{bar}</div>'


def timeline_section(simulated: Timeline, runs: Sequence[Timeline], shown: Sequence[int]) -> dict[str, str]:
    """The chart's frame: what it shows, and its colours."""
    names = " and ".join(run.source for run in runs)
    of = len(simulated.workers)
    some = f" {len(shown)} of {of} workers are shown." if len(shown) < of else ""
    lanes = ", ".join(LANE_ORDER[1:])
    what = (
        f"{simulated.minibatches} minibatches, {names}: a thick row per worker for what it computes, thin ones below "
        f"for {lanes}, where there are any. The shaded part is the steady state.{some}"
    )
    kinds = {kind for run in runs for kind in set(run.events.kind)}
    seen: dict[str, list[str]] = {}
    for kind in LANES:
        if kind in kinds:
            text = TEXTS[kind].rsplit(" ", 1)[0] if LANES[kind] in ("send", "receive") else TEXTS[kind]
            texts = seen.setdefault(COLOURS[kind], [])
            texts += [text] if text not in texts else []
    return {"what": escape(what), "legend": "".join(_swatch(", ".join(t), colour) for colour, t in seen.items())}


def memory_section(plan: Plan, summary: Summary, measured: Summary | None) -> str:
    """The strips' frame, and the table of peaks."""
    limit = plan.cluster.memory_bytes
    line = "no limit" if limit is None else f"the limit of {format_bytes(limit)}, dashed where it is near"
    headers, rows = worker_cells(summary.workers)
    if measured is not None and any(worker.peak_bytes is not None for worker in measured.workers):
        theirs = [cells[headers.index("peak memory")] for cells in worker_cells(measured.workers)[1]]
        headers = [*headers, "measured peak"]
        rows = [[*row, peak] for row, peak in zip(rows, theirs, strict=True)]
    note = " Measured in another colour." if measured is not None else ""
    over = [w.rank for w in summary.workers if w.peak_bytes and w.limit_bytes and w.peak_bytes > w.limit_bytes]
    warning = f'<p class="warn">Worker {", ".join(map(str, over))} would need more than there is.</p>' if over else ""
    return (
        f"<p>What each worker holds over time, against {escape(line)}; simulated.{note}</p>{warning}"
        '<div class="chart" id="memory-chart" role="img" aria-label="Memory of each worker over time">'
        "<canvas></canvas></div>" + _table("Workers", headers, rows, text_columns=2)
    )


def measured_section(plan: Plan, against: Against) -> str:
    """The numbers of the run beside those that were predicted, and how far apart the events are."""
    headers, rows = pace_cells(against, plan)
    text = (
        f"<p>Starts and ends of {against.as_planned.events:,} forwards and backwards, apart by shares of the run's "
        "length. At the plan's times it is the prediction that is compared; at the run's own, a simulation whose "
        "stages take what they took on average in the run.</p>"
    )
    return (
        _table("Predicted and measured", headers, rows, text_columns=1)
        + text
        + _table("Events apart", APART_HEADERS, apart_cells(against), text_columns=1, last_is_text=True)
        + "<p>Means of the stages' times, simulated and measured:</p>"
        + _table("Stages' times", STAGE_HEADERS, stage_cells(against), text_columns=1)
    )


def comparison_section(comparison: Comparison) -> str:
    """The table of `plan compare`."""
    headers, rows = comparison_cells(comparison)
    table = _table("Ways to train", headers, rows, text_columns=2, chosen=0, last_is_text=True)
    return table + "".join(f'<p class="note">{escape(line)}</p>' for line in comparison_legend(comparison).splitlines())


def sweep_section(sweep: Sweep) -> str:
    """The picture and the table of `plan sweep`."""
    headers, rows = sweep_cells(sweep)
    table = _table("Plans by bandwidth", headers, rows, text_columns=2, last_is_text=True)
    return (
        f'<figure class="scroll" tabindex="0">{sweep_svg(sweep)}</figure>'
        f"<details><summary>As a table</summary>{table}</details>"
    )


def _table(
    label: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: int,
    chosen: int | None = None,
    last_is_text: bool = False,
) -> str:
    def css(column: int) -> str:
        text = column < text_columns or (last_is_text and column == len(headers) - 1)
        return "" if text else ' class="number"'

    head = "".join(f'<th scope="col"{css(i)}>{escape(header)}</th>' for i, header in enumerate(headers))
    marked = ' class="chosen"'
    body = "".join(
        f"<tr{marked if number == chosen else ''}>"
        + "".join(f"<td{css(i)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
    return f"{region}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
