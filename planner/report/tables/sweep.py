"""The table of `plan sweep`, and its plot for the terminal."""

from __future__ import annotations

import math

from planner.analysis.sweep import ConfigChange, Quantity, Sweep, SweepPoint
from planner.formats.plan_parts import short_config
from planner.report.tables.plan import bottleneck_place
from planner.report.tables.table import Table
from planner.report.tables.ways import speed_over
from planner.units import format_bandwidth, format_memory, format_rate, format_seconds

_WIDTH = 40
NONE_FITS = "none fits"


def sweep_report(sweep: Sweep) -> str:
    """Report the points, a plot of their speeds, and where the config changes."""
    return "\n\n".join((sweep_table(sweep).text(), bars(sweep), changes_text(sweep)))


def value_text(value: float, quantity: Quantity) -> str:
    """Write a value of the quantity with its unit."""
    match quantity:
        case "bandwidth":
            return format_bandwidth(value)
        case "memory":
            return format_memory(round(value))
        case "gpus":
            return f"{value:.0f} GPU{'s' * (value > 1)}"


def sweep_table(sweep: Sweep) -> Table:
    """Tabulate the points."""
    headers = [sweep.quantity, "config", "GPUs used", "time per batch", "samples/s"]
    headers += ["over one GPU", "over data parallel", "limited by"]
    rows = [[value_text(point.value, sweep.quantity), *_cells(point)] for point in sweep.points]
    table = Table(headers, rows, "rlrrrrrl")
    known = any(point.samples_per_s is not None for point in sweep.points)
    return table if known else table.without("samples/s")


def _cells(point: SweepPoint) -> list[str]:
    if point.config is None or point.bottleneck is None or point.seconds_per_minibatch is None:
        return [NONE_FITS, "", "", "", "", "", ""]
    return [
        short_config(point.config),
        str(point.workers),
        format_seconds(point.seconds_per_minibatch / (point.microbatches or 1)),
        "" if point.samples_per_s is None else format_rate(point.samples_per_s),
        speed_over(point.speedup_over_one_gpu, point.one_gpu_over_memory_bytes),
        speed_over(point.speedup_over_data_parallel, point.data_parallel_over_memory_bytes),
        bottleneck_place(point.bottleneck),
    ]


def bars(sweep: Sweep) -> str:
    """Plot the speeds as bars, each with its config."""
    most = max((point.rate_per_s for point in sweep.points), default=0.0) or 1.0
    labels = [value_text(point.value, sweep.quantity) for point in sweep.points]
    width = max(map(len, labels))
    lines = [sweep.rate_unit]
    for label, point in zip(labels, sweep.points, strict=True):
        filled = "█" * math.floor(point.rate_per_s / most * _WIDTH + 0.5)
        text = NONE_FITS if point.config is None else f"{format_rate(point.rate_per_s)}  {short_config(point.config)}"
        lines.append(f"{label:>{width}} │{filled} {text}")
    return "\n".join(lines)


def changes_text(sweep: Sweep) -> str:
    """List where the config changes."""
    if not sweep.changes:
        return "The config is the same throughout."
    lines = ["The config changes:", *(f"  {_change_text(change, sweep.quantity)}" for change in sweep.changes)]
    if sweep.out_of_time:
        lines.append("The time limit ended the search: a change may be anywhere down to the point before it.")
    return "\n".join(lines)


def _change_text(change: ConfigChange, quantity: Quantity) -> str:
    below, above = (short_config(config or NONE_FITS) for config in (change.from_config, change.above.config))
    place = value_text(change.above.value, quantity)
    return f"{'at' if quantity == 'gpus' else 'about'} {place}: {below} -> {above}"
