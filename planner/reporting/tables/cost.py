"""What a whole training takes and costs, on the GPUs that were asked about and on others."""

from collections.abc import Mapping

from planner.formats.fit import Fit, FitRow, TrainingRun
from planner.reporting.tables.table import optional_text
from planner.units import counted, format_count, format_days, format_dollars


def cost_lines(answer: Fit) -> list[str]:
    """Say how long the training takes and what it costs, and which numbers of GPUs are the fastest
    and the cheapest of those that were tried; nothing where no training is to be paid.
    """
    run = answer.run
    fastest = answer.fastest_row
    if run is None or answer.asked.days is None or fastest is None:
        return []

    tokens = format_count(run.tokens)
    lines = [f"a training on {tokens} tokens: {_words(answer.asked)}"]
    if len(answer.rows) > 1:
        lines.append(f"fastest of these: {_words(fastest)}")
        cheapest = answer.cheapest_row
        if cheapest is not None:
            lines.append(f"cheapest of these: {_words(cheapest)}")

    return lines


def cost_cells(row: FitRow, run: TrainingRun) -> Mapping[str, str]:
    """Return the cells of a number of GPUs; empty ones where nothing fits."""
    cells = {"days": optional_text(row.days, format_days) or ""}
    if run.dollars_per_gpu_hour is not None:
        cells["cost"] = optional_text(row.dollars, format_dollars) or ""
    return cells


def _words(row: FitRow) -> str:
    """Write "64 GPUs, 120 days, $369,000"."""
    parts = [counted(row.gpus, "GPU"), f"{format_days(row.days or 0.0)} days"]
    if row.dollars is not None:
        parts.append(format_dollars(row.dollars))
    return ", ".join(parts)
