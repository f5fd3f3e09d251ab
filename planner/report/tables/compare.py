"""The table of `plan compare`: the chosen plan and the baselines."""

from __future__ import annotations

from planner.analysis.compare import Comparison, ComparisonRow
from planner.analysis.usual_ways import DATA_PARALLEL, EQUAL_STAGES
from planner.formats.plan_parts import short_config
from planner.report.tables.plan import cluster_line, less_or_more
from planner.report.tables.table import Table, named_values
from planner.report.tables.ways import speed_over
from planner.units import format_bytes, format_rate


def comparison_report(comparison: Comparison) -> str:
    """Report the chosen plan and the baselines, one row each."""
    head = named_values([("model", comparison.model), ("cluster", cluster_line(comparison.cluster))])
    return f"{head}\n\n{comparison_table(comparison).text()}\n\n{comparison_legend(comparison)}"


def comparison_table(comparison: Comparison) -> Table:
    """Tabulate the rows."""
    chosen = comparison.rows[0]
    each = "sample" if chosen.samples_per_s is not None else "batch"
    rate = "tokens/s" if chosen.tokens_per_s is not None else f"{each}{'s' if each == 'sample' else 'es'}/s"
    headers = ["", "speed-up", "config", rate, "MFU", "memory", f"sent/{each}", "less sent", "late", "idle"]
    table = Table(headers, [_cells(row) for row in comparison.rows], "lllrrrrrrr")
    return table if chosen.flop_utilisation is not None else table.without("MFU")


def _cells(row: ComparisonRow) -> list[str]:
    sent = row.communication_bytes_per_sample
    return [
        row.name,
        speed_over(row.speedup, row.over_memory_bytes),
        short_config(row.config),
        format_rate(row.tokens_per_s or row.samples_per_s or 1 / row.seconds_per_microbatch),
        "" if row.flop_utilisation is None else f"{row.flop_utilisation:.0%}",
        format_bytes(row.memory_bytes),
        format_bytes(row.communication_bytes if sent is None else sent),
        "" if row.communication_cut is None else less_or_more(row.communication_cut).removesuffix(" less"),
        f"{row.staleness}",
        f"{row.idle_share:.0%}",
    ]


def _reference(comparison: Comparison) -> str:
    """Say what speed-ups are relative to."""
    if comparison.over == DATA_PARALLEL:
        return "speed-up and less sent: relative to data parallelism"
    relative = "neither does any other baseline" if comparison.over is None else f"speed-up is over {comparison.over}"
    return f"data parallelism does not fit, and {relative}; less sent: than data parallelism would send"


def comparison_legend(comparison: Comparison) -> str:
    """Explain the columns, and the rows that run under another schedule."""
    lines = [
        _reference(comparison),
        "memory: per GPU; late: updates that gradients are late; idle: share of the workers' time without computation",
    ]
    chosen, *others = comparison.rows
    for schedule in dict.fromkeys(row.schedule for row in others if row.schedule != chosen.schedule):
        rows = [row for row in others if row.schedule is schedule]
        names = ", ".join(row.name for row in rows) if len(rows) < len(others) else "all others"
        lines.append(f"{names}: {schedule}, one update for {rows[0].microbatches} microbatches")
    if any("ZeRO" in row.name for row in others):
        lines.append("ZeRO-1 to 3: data parallel, with the optimizer's state, gradients, weights divided over the GPUs")
    if chosen.flop_utilisation is not None:
        lines.append("MFU: share of the GPUs' peak that the model's FLOPs take, without recomputation")
    if by_formula := [row.name for row in comparison.rows if not row.simulated and "ZeRO-" not in row.name]:
        names = ", ".join(by_formula) if len(by_formula) < len(comparison.rows) else "all"
        lines.append(f"{names}: by the cost model, without simulation, so waiting for messages is left out")
    if any(EQUAL_STAGES in row.name for row in others):
        lines.append(f"{EQUAL_STAGES}: as many of the model's blocks in each, with replicas on the other GPUs")
    return "\n".join(lines)
