"""A sweep for people: a table, a plot for the terminal."""

from __future__ import annotations

import math

from tabulate import tabulate

from planner.analysis.sweep import Change, Point, Quantity, Sweep
from planner.units import format_bandwidth, format_bytes, format_rate, format_seconds

_WIDTH = 40


def sweep_report(sweep: Sweep) -> str:
    """Points, a plot of speed-ups, and where the config changes."""
    return "\n\n".join((_table(sweep), bars(sweep), changes_text(sweep)))


def value_text(value: float, quantity: Quantity) -> str:
    """The quantity's value with its unit."""
    match quantity:
        case "bandwidth":
            return format_bandwidth(value)
        case "memory":
            return format_bytes(value)
        case "gpus":
            return f"{value:.0f} GPU{'s' * (value > 1)}"


def _table(sweep: Sweep) -> str:
    headers, rows = sweep_cells(sweep)
    return tabulate(
        rows,
        headers=headers,
        disable_numparse=True,
        colalign=("right", "left", *["right"] * (len(headers) - 3), "left"),
    )


def sweep_cells(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """The table's headers and rows."""
    headers = [
        sweep.quantity,
        "config",
        "GPUs used",
        "time per batch",
        "samples/s",
        "over one GPU",
        "over data parallel",
        "limited by",
    ]
    rows = [[value_text(point.value, sweep.quantity), *_cells(point)] for point in sweep.points]
    if all(point.samples_per_s is None for point in sweep.points):
        headers.pop(4)
        rows = [[*row[:4], *row[5:]] for row in rows]
    return headers, rows


def _cells(point: Point) -> list[str]:
    if point.config is None or point.bottleneck is None or point.seconds_per_minibatch is None:
        return ["none fits", "", "", "", "", "", ""]
    return [
        point.config,
        str(point.workers),
        format_seconds(point.seconds_per_minibatch / (point.microbatches or 1)),
        "" if point.samples_per_s is None else format_rate(point.samples_per_s),
        f"{point.speedup_over_one_gpu:.2f}x",
        f"{point.speedup_over_data_parallel:.2f}x",
        f"{point.bottleneck.resource.replace('_', ' ')} of stage {point.bottleneck.stage}",
    ]


def bars(sweep: Sweep) -> str:
    """Speed-up over one GPU as bars, the plan's name behind each."""
    most = max((point.speedup_over_one_gpu or 0.0 for point in sweep.points), default=0.0) or 1.0
    labels = [value_text(point.value, sweep.quantity) for point in sweep.points]
    width = max(map(len, labels))
    lines = ["speed-up over one GPU"]
    for label, point in zip(labels, sweep.points, strict=True):
        speed = point.speedup_over_one_gpu or 0.0
        filled = "█" * math.floor(speed / most * _WIDTH + 0.5)
        text = "none fits" if point.config is None else f"{speed:.2f}x  {point.config}"
        lines.append(f"{label:>{width}} │{filled} {text}")
    return "\n".join(lines)


def changes_text(sweep: Sweep) -> str:
    """Where the config changes."""
    if not sweep.changes:
        return "The config is the same throughout."
    return "The config changes:\n" + "\n".join(f"  {change_text(change, sweep.quantity)}" for change in sweep.changes)


def change_text(change: Change, quantity: Quantity) -> str:
    """One line: where, from what, to what."""
    ends = [config or "none fits" for config in (change.from_config, change.above.config)]
    place = value_text(change.above.value, quantity)
    return f"{'at' if quantity == 'gpus' else 'about'} {place}: {ends[0]} -> {ends[1]}"
