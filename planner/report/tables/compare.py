"""A comparison for people."""

from __future__ import annotations

from tabulate import tabulate

from planner.analysis.compare import Comparison, Row
from planner.report.tables.plan import cluster_line
from planner.units import format_bytes, format_rate


def comparison_report(comparison: Comparison) -> str:
    """The chosen plan and the baselines, a line each."""
    about = [("model", comparison.model), ("cluster", cluster_line(comparison.cluster))]
    head = tabulate(about, tablefmt="plain", disable_numparse=True)
    headers, rows = comparison_cells(comparison)
    aligned = ("left", "left", *["right"] * 6, "left")
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned)
    return f"{head}\n\n{table}\n\n{comparison_legend(comparison)}"


def comparison_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table's headers and rows."""
    known = comparison.rows[0].samples_per_s is not None
    each = "sample" if known else "batch"
    headers = ["", "config", "samples/s" if known else "batches/s", "speed-up", "memory per GPU"]
    headers += [f"sent per {each}", "less sent", "idle", "fits"]
    return headers, [_cells(row) for row in comparison.rows]


def _cells(row: Row) -> list[str]:
    sent = row.communication_bytes_per_sample
    return [
        row.name,
        row.config,
        format_rate(row.samples_per_s or 1 / row.seconds_per_microbatch),
        f"{row.speedup_over_data_parallel:.2f}x",
        format_bytes(row.memory_bytes),
        format_bytes(row.communication_bytes if sent is None else sent),
        "" if row.communication_cut is None else f"{row.communication_cut:.0%}",
        f"{row.idle_share:.0%}",
        _fits(row),
    ]


def _fits(row: Row) -> str:
    return f"no, {format_bytes(row.over_memory_bytes)} too many" if row.over_memory_bytes else "yes"


def comparison_legend(comparison: Comparison) -> str:
    """What the columns mean, and where rows differ in more than their stages."""
    lines = [
        "speed-up and less sent: against data parallel; idle: share of the workers' time in which they do not compute",
    ]
    chosen, *others = comparison.rows
    if chosen.schedule == "interleaved":
        lines.append(f"all others: 1f1b-flush, {chosen.microbatches} microbatches per minibatch too")
    else:
        lines += [
            f"{row.name}: gradients are reduced and weights updated once for {row.microbatches} microbatches"
            for row in others
            if row.schedule != chosen.schedule
        ]
    return "\n".join(lines)
