"""The table of a comparison of schedules."""

from planner.formats.plan_parts import config_words
from planner.reporting.tables.plan import cluster_line
from planner.reporting.tables.table import named_values, table_of
from planner.solver.each_schedule import ScheduleComparison, ScheduleRow
from planner.units import format_bytes, format_rate


def schedules_report(comparison: ScheduleComparison) -> str:
    """Report the best plan of each schedule, and why others have none."""
    head = named_values(
        [("model", comparison.model), ("cluster", cluster_line(comparison.cluster))]
    )
    planned = [row for row in comparison.rows if row.obstacle is None]
    parts = [head]
    if planned:
        parts.append(table_of([_cells(row) for row in planned], "rllrrrrrr").text())
        parts.append("Speed-ups are over the first row with the same global batch.")

    parts += [
        f"no plan under {row.schedule}, {row.microbatches} microbatches: {row.obstacle}"
        for row in comparison.rows
        if row.obstacle is not None
    ]
    return "\n\n".join(parts)


def _cells(row: ScheduleRow) -> dict[str, str | None]:
    assert row.seconds_per_microbatch is not None
    assert row.memory_bytes is not None
    rate = row.samples_per_s or 1 / row.seconds_per_microbatch
    if row.global_batch is None:
        batch = row.microbatches
    else:
        batch = row.global_batch

    return {
        "global batch": f"{batch}",
        "schedule": str(row.schedule),
        "config": config_words(row.config or ""),
        "microbatches": f"{row.microbatches}",
        "speed-up": f"{row.speedup:.2f}x",
        "batches/s" if row.samples_per_s is None else "samples/s": format_rate(rate),
        "bubble": f"{row.bubble_share:.0%}",
        "memory": format_bytes(row.memory_bytes),
        "stale": f"{row.staleness}",
    }
