"""The tables that compare plans: with baselines, between schedules, and over a sweep."""

from __future__ import annotations

from planner.analysis.choose import Choice, Option
from planner.analysis.compare import Comparison, ComparisonRow
from planner.analysis.sweep import ConfigChange, Quantity, Sweep, SweepPoint
from planner.analysis.usual_ways import DATA_PARALLEL, EQUAL_STAGES
from planner.errors import InputError
from planner.formats.plan_parts import short_config
from planner.options.solving import MinibatchError
from planner.reporting.tables.plan import bottleneck_place, cluster_line, less_or_more, speed_over
from planner.reporting.tables.table import Table, named_values, table_of
from planner.units import format_bandwidth, format_bytes, format_memory, format_rate, format_seconds

_BAR_LENGTH = 40
NONE_FITS = "none fits"


def choice_report(choice: Choice) -> str:
    """List each schedule and microbatch size with its best plan, or why it has none.

    "late" is how many updates late the plan's gradients are.
    """
    several = len({option.profile.digest for option in choice.options}) > 1
    unit = "microbatch" if choice.best.profile.microbatch_size is None else "sample"
    rows = []
    for option in choice.options:
        plan = option.plan
        rows.append(
            {
                "schedule": option.schedule,
                "batch size": option.profile.microbatch_size if several else None,
                "plan": short_config(plan.config) if plan else "-",
                f"time per {unit}": format_seconds(option.seconds_per_sample) if plan else "-",
                f"{unit}{'s' if unit == 'sample' else 'es'} per update": option.samples_per_update if plan else "-",
                "late": plan.staleness if plan else "-",
                "memory per GPU": format_bytes(option.memory_bytes) if plan else "-",
                "idle": f"{option.idle_share:.0%}" if plan else "-",
                "": "chosen" if option is choice.best else _why(option),
            }
        )
    return table_of(rows).text()


def _why(option: Option) -> str:
    """Say in a few words why there is no plan; solving for this schedule alone gives the whole message."""
    if option.obstacle is None:
        return ""
    if isinstance(option.obstacle, MinibatchError):
        return "cannot make a minibatch of this size"
    return "not possible: see it alone" if isinstance(option.obstacle, InputError) else "does not fit the memory"


def sweep_report(sweep: Sweep) -> str:
    """Report the points, a plot of their speeds, and where the config changes."""
    most = max((point.rate_per_s for point in sweep.points), default=0.0) or 1.0
    labels = [value_text(point.value, sweep.quantity) for point in sweep.points]
    bars = [sweep.rate_unit]
    for label, point in zip(labels, sweep.points, strict=True):
        filled = "█" * int(point.rate_per_s / most * _BAR_LENGTH + 0.5)
        bars.append(f"{label:>{max(map(len, labels))}} │{filled} {rate_text(point)}")
    changes = ["The config changes:", *(f"  {_change(change, sweep.quantity)}" for change in sweep.changes)]
    if sweep.out_of_time:
        changes.append("The time limit ended the search: a change may be anywhere down to the point before it.")
    if not sweep.changes:
        changes = ["The config is the same throughout."]
    return "\n\n".join((sweep_table(sweep).text(), "\n".join(bars), "\n".join(changes)))


def rate_text(point: SweepPoint) -> str:
    """Write the speed of a point's plan and its config."""
    return NONE_FITS if point.config is None else f"{format_rate(point.rate_per_s)}  {short_config(point.config)}"


def value_text(value: float, quantity: Quantity) -> str:
    """Write a value of the quantity with its unit."""
    match quantity:
        case "bandwidth":
            return format_bandwidth(value)
        case "memory":
            return format_memory(round(value))
        case "gpus":
            return f"{value:.0f} GPU{'s' * (value > 1)}"


def _change(change: ConfigChange, quantity: Quantity) -> str:
    below, above = (short_config(config or NONE_FITS) for config in (change.from_config, change.above.config))
    place = value_text(change.above.value, quantity)
    return f"{'at' if quantity == 'gpus' else 'about'} {place}: {below} -> {above}"


def sweep_table(sweep: Sweep) -> Table:
    """Tabulate the points."""
    rows = []
    for point in sweep.points:
        seconds, samples = point.seconds_per_minibatch, point.samples_per_s
        parallel = speed_over(point.speedup_over_data_parallel, point.data_parallel_over_memory_bytes)
        rows.append(
            {
                sweep.quantity: value_text(point.value, sweep.quantity),
                "config": short_config(point.config or NONE_FITS),
                "GPUs used": point.workers,
                "time per batch": None if seconds is None else format_seconds(seconds / (point.microbatches or 1)),
                "samples/s": None if samples is None else format_rate(samples),
                "over one GPU": speed_over(point.speedup_over_one_gpu, point.one_gpu_over_memory_bytes),
                "over data parallel": parallel,
                "limited by": point.bottleneck and bottleneck_place(point.bottleneck),
            }
        )
    return table_of(rows, "rlrrrrrl")


def comparison_report(comparison: Comparison) -> str:
    """Report the chosen plan and the baselines, one row each."""
    head = named_values([("model", comparison.model), ("cluster", cluster_line(comparison.cluster))])
    return f"{head}\n\n{comparison_table(comparison).text()}\n\n{comparison_legend(comparison)}"


def comparison_table(comparison: Comparison) -> Table:
    """Tabulate the rows."""
    chosen = comparison.rows[0]
    each, each_s = ("sample", "samples/s") if chosen.samples_per_s is not None else ("batch", "batches/s")
    rate = "tokens/s" if chosen.tokens_per_s is not None else each_s
    return table_of([_cells(row, each, rate) for row in comparison.rows], "lllrrrrrrr")


def _cells(row: ComparisonRow, each: str, rate: str) -> dict[str, str | None]:
    sent, used, cut = row.communication_bytes_per_sample, row.flop_utilisation, row.communication_cut
    return {
        "": row.name,
        "speed-up": speed_over(row.speedup, row.over_memory_bytes),
        "config": short_config(row.config),
        rate: format_rate(row.tokens_per_s or row.samples_per_s or 1 / row.seconds_per_microbatch),
        "MFU": None if used is None else f"{used:.0%}",
        "memory": format_bytes(row.memory_bytes),
        f"sent/{each}": format_bytes(row.communication_bytes if sent is None else sent),
        "less sent": "" if cut is None else less_or_more(cut).removesuffix(" less"),
        "late": f"{row.staleness}",
        "idle": f"{row.idle_share:.0%}",
    }


def comparison_legend(comparison: Comparison) -> str:
    """Explain the columns, and the rows that run under another schedule."""
    lines = ["speed-up and less sent: relative to data parallelism"]
    if comparison.over != DATA_PARALLEL:
        other = f"speed-up is over {comparison.over}" if comparison.over else "neither does any other baseline"
        lines = [f"data parallelism does not fit, and {other}; less sent: than data parallelism would send"]
    lines.append(
        "memory: per GPU; late: updates that gradients are late; idle: share of the workers' time without computation"
    )
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
