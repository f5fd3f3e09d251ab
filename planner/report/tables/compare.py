"""The table of `plan compare`: the chosen plan and the baselines."""

from __future__ import annotations

from planner.analysis.compare import Comparison, ComparisonRow
from planner.report.tables.plan import cluster_line
from planner.report.tables.table import Table, named_values
from planner.units import format_bytes, format_rate


def comparison_report(comparison: Comparison) -> str:
    """Report the chosen plan and the baselines, one row each."""
    head = named_values([("model", comparison.model), ("cluster", cluster_line(comparison.cluster))])
    return f"{head}\n\n{comparison_table(comparison).text()}\n\n{comparison_legend(comparison)}"


def comparison_table(comparison: Comparison) -> Table:
    """Tabulate the rows."""
    known = comparison.rows[0].samples_per_s is not None
    each = "sample" if known else "batch"
    headers = ["", "config", "samples/s" if known else "batches/s", "speed-up", "memory per GPU"]
    headers += [f"sent per {each}", "less sent", "idle", "fits"]
    return Table(headers, [_cells(row) for row in comparison.rows], "llrrrrrrl")


def _cells(row: ComparisonRow) -> list[str]:
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
        f"no, {format_bytes(row.over_memory_bytes)} too many" if row.over_memory_bytes else "yes",
    ]


def comparison_legend(comparison: Comparison) -> str:
    """Explain the columns, and the rows that run under another schedule."""
    lines = [
        "speed-up and less sent: relative to data parallelism; idle: share of the workers' time without computation",
    ]
    chosen, *others = comparison.rows
    if chosen.schedule.chunked:
        lines.append(f"all others: 1f1b-flush, {chosen.microbatches} microbatches per minibatch too")
    else:
        lines += [
            f"{row.name}: one all-reduce and one update for {row.microbatches} microbatches"
            for row in others
            if row.schedule != chosen.schedule
        ]
    return "\n".join(lines)
