"""The tables that compare plans: with baselines, between schedules, and over a sweep."""

from __future__ import annotations

import math

from planner.analysis.choose import Choice, Option
from planner.analysis.compare import Comparison, ComparisonRow
from planner.analysis.sweep import ConfigChange, Quantity, Sweep, SweepPoint
from planner.analysis.usual_ways import DATA_PARALLEL, EQUAL_STAGES
from planner.errors import InputError
from planner.formats.plan_parts import short_config
from planner.options.solving import MinibatchError
from planner.report.tables.plan import bottleneck_place, cluster_line, less_or_more, speed_over
from planner.report.tables.table import Table, named_values
from planner.units import format_bandwidth, format_bytes, format_memory, format_rate, format_seconds


def choice_report(choice: Choice) -> str:
    """List each schedule and microbatch size with its best plan, or why it has none.

    "late" is how many updates late the plan's gradients are.
    """
    several = len({option.profile.digest for option in choice.options}) > 1
    known = choice.best.profile.microbatch_size is not None
    headers = [
        "schedule",
        *(["batch size"] if several else []),
        "plan",
        f"time per {'sample' if known else 'microbatch'}",
        f"{'samples' if known else 'microbatches'} per update",
        "late",
        "memory per GPU",
        "idle",
        "",
    ]
    rows = [
        [option.schedule, *([option.profile.microbatch_size] if several else []), *_answer(option, choice)]
        for option in choice.options
    ]
    return Table(headers, rows).text()


def _answer(option: Option, choice: Choice) -> list[str]:
    if option.plan is None:
        return ["-", "-", "-", "-", "-", "-", _why(option)]
    return [
        short_config(option.plan.config),
        format_seconds(option.seconds_per_sample),
        str(option.samples_per_update),
        str(option.plan.staleness),
        format_bytes(option.memory_bytes),
        f"{option.idle_share:.0%}",
        "chosen" if option is choice.best else _why(option),
    ]


def _why(option: Option) -> str:
    """Say in a few words why there is no plan; solving for this schedule alone gives the whole message."""
    if option.obstacle is None:
        return ""
    if isinstance(option.obstacle, MinibatchError):
        return "cannot make a minibatch of this size"
    return "not possible: see it alone" if isinstance(option.obstacle, InputError) else "does not fit the memory"


_BAR_LENGTH = 40
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
    rows = [[value_text(point.value, sweep.quantity), *_point_cells(point)] for point in sweep.points]
    table = Table(headers, rows, "rlrrrrrl")
    known = any(point.samples_per_s is not None for point in sweep.points)
    return table if known else table.without("samples/s")


def _point_cells(point: SweepPoint) -> list[str]:
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
        filled = "█" * math.floor(point.rate_per_s / most * _BAR_LENGTH + 0.5)
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
