"""The tables of a run: simulated, measured, one compared with the other, and trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.analysis.compare_runs import RunComparison, TimingError
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.report.tables.plan import pace
from planner.report.tables.table import Table, named_values
from planner.simulator.summary import Summary, WorkerUse
from planner.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.workers.job import Loss, StartResult, TrainResult, WorkerReport


LOSS_WINDOW = 10  # minibatches averaged at either end, because single losses are noisy


def training_report(result: TrainResult) -> str:
    """Report throughput, workers, loss and evaluations."""
    parts = [_throughput(result), workers_table(result.reports), _loss(result)]
    if result.evaluations:
        parts.append(_evaluations(result))
    return "\n\n".join(parts)


def loss_window(losses: tuple[Loss, ...]) -> int:
    """Return how many minibatches to average at either end of a run."""
    return max(1, min(LOSS_WINDOW, len(losses) // 2))


def loss_ends(losses: tuple[Loss, ...]) -> tuple[float, float]:
    """Average the losses of the first and of the last minibatches."""
    window = loss_window(losses)
    first, last = (
        sum(math.nan if entry.loss is None else entry.loss for entry in part) / window
        for part in (losses[:window], losses[-window:])
    )
    return first, last


def percent_error(predicted: float, measured: float) -> str:
    """Write the signed error of a prediction, relative to the measurement."""
    return f"{(predicted - measured) / measured:+.1%}" if measured else "-"


def _throughput(result: TrainResult) -> str:
    predicted, measured = result.predicted_samples_per_s, result.samples_per_s
    lines = [
        ("config", short_config(result.config)),
        ("schedule", result.schedule),
        *([("device", _device(result))] if result.device is not None else []),
        ("minibatches", f"{result.minibatches} of {result.minibatch_size} samples in {result.seconds:.1f} s"),
        ("measured", f"{measured:.1f} samples/s in steady state" if measured else "too few minibatches to measure"),
    ]
    if predicted is not None:
        lines.append(("predicted", f"{predicted:.1f} samples/s ({percent_error(predicted, measured)})"))
    if result.synchronous_start is not None:
        lines.append(("synchronous start", _start(result.synchronous_start)))
    if result.likely_cause is not None:
        lines.append(("likely cause", result.likely_cause))
    if deferred := sum(report.deferred_weights for report in result.reports):
        lines.append(("weights", f"made stage by stage: {deferred} of {result.workers} workers made only their own"))
    lines += [("restarted", f"after {reason}") for reason in result.restarts]
    if result.resumed_from is not None:
        lines.append(("resumed from", f"{result.resumed_from}, minibatch {result.first_minibatch}"))
    if result.checkpoint is not None:
        lines.append(("checkpoint", result.checkpoint))
    if result.saved_weights is not None:
        lines.append(("weights", result.saved_weights))
    return named_values(lines)


def _start(start: StartResult) -> str:
    """Write how the first minibatches went."""
    predicted = start.predicted_samples_per_s
    against = (
        "" if predicted is None else f", predicted {predicted:.1f} ({percent_error(predicted, start.samples_per_s)})"
    )
    how = f"{start.schedule} with {start.microbatches} microbatches"
    return f"the first {start.minibatches} minibatches, {how}: {start.samples_per_s:.1f} samples/s{against}"


def _device(result: TrainResult) -> str:
    name = f" ({result.device_name})" if result.device_name is not None else ""
    return f"{result.device}{name}, messages over {result.backend}"


def workers_table(reports: Sequence[WorkerReport]) -> str:
    """Write what each worker measured."""
    headers = ["worker", "stage", "busy", "peak memory predicted", "measured", "reserved", "used of the GPU"]
    headers += ["weight versions"]
    rows = [
        [
            report.rank,
            report.stage,
            f"{report.busy_share:.0%}",
            format_bytes(report.predicted_memory_bytes) if report.predicted_memory_bytes else "-",
            format_bytes(report.peak_memory_bytes),
            _bytes_or_dash(report.reserved_memory_bytes),
            _bytes_or_dash(report.used_memory_bytes),
            report.weight_versions,
        ]
        for report in reports
    ]
    table = Table(headers, rows)
    if all(report.used_memory_bytes is None for report in reports):  # on CPUs
        table = table.without("reserved").without("used of the GPU")
    return table.text()


def _bytes_or_dash(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _loss(result: TrainResult) -> str:
    if result.random_data:
        return "Trained on random batches: the model file has no dataset(), so the loss means nothing."
    diverged = next((entry.minibatch for entry in result.losses if entry.loss is None), None)
    if diverged is not None:
        return f"The loss is not finite from minibatch {diverged} on: lower the learning rate."
    if not result.losses:
        return "No minibatch was left to train: the checkpoint is from the end of the run."
    first, last = loss_ends(result.losses)
    window = loss_window(result.losses)
    return f"loss {first:.4f} -> {last:.4f} (means of the first and the last {window} minibatches)"


def _evaluations(result: TrainResult) -> str:
    """Write the last evaluation, and the one with the smallest loss."""
    last = result.evaluations[-1]
    best = min(result.evaluations, key=lambda each: math.inf if each.loss is None else each.loss)
    lines = [f"evaluation on {last.samples} samples: {last}"]
    if best is not last:
        lines.append(f"best after minibatch {best.minibatch}: {best}")
    return "\n".join(lines)


def run_comparison_report(comparison: RunComparison, plan: Plan) -> str:
    """Report the pace of both runs, the timing errors of events, and the stages' times."""
    tables = pace_table(comparison, plan), timing_table(comparison), stage_times_table(comparison)
    pace_text, timing_text, stages_text = (table.text() for table in tables)
    notes = "\n".join(timing_notes(comparison))
    return "\n\n".join((pace_text, notes, timing_text, stages_text))


def pace_table(comparison: RunComparison, plan: Plan) -> Table:
    """Compare pace, bubble and lengths as planned, simulated and measured."""
    predicted, simulated, measured = plan.predicted, comparison.simulated, comparison.measured
    seconds = predicted.seconds_per_minibatch, simulated.seconds_per_minibatch
    rows = [
        ["pace", pace(predicted.samples_per_s, seconds[0])]
        + [pace(run.samples_per_s, run.seconds_per_minibatch) for run in (simulated, measured)],
        ["time, relative to measured", *(f"{each / measured.seconds_per_minibatch - 1:+.1%}" for each in seconds), ""],
        ["bubble", "", percent(simulated.bubble_share), percent(measured.bubble_share)],
        ["whole run", "", format_seconds(simulated.seconds), format_seconds(measured.seconds)],
        ["start-up", "", format_seconds(simulated.start_up_s), format_seconds(measured.start_up_s)],
        ["drain", "", format_seconds(simulated.drain_s), format_seconds(measured.drain_s)],
    ]
    return Table(["", "plan", "simulated", "measured"], rows, "lrrr")


def timing_notes(comparison: RunComparison) -> tuple[str, str]:
    """Say what the timing errors are, and how the two rows differ."""
    events = f"{comparison.as_planned.events:,} forwards and backwards"
    return (
        f"How far simulated starts and ends of {events} are from measured ones, as shares of the run's length.",
        "The first row is the error of the prediction; the second, that of its messages and waits alone.",
    )


def timing_table(comparison: RunComparison) -> Table:
    """List the timing errors at the plan's times and at the run's own."""
    both = (("at the plan's times", comparison.as_planned), ("at the run's own times", comparison.as_run))
    rows = [
        [name, *(f"{share:.2%}" for share in (e.median_share, e.p95_share, e.worst_share)), _worst(e)]
        for name, e in both
    ]
    return Table(["", "median", "95%", "largest", "where the largest is"], rows, "lrrrl")


def stage_times_table(comparison: RunComparison) -> Table:
    """List the mean times of each stage, simulated and measured."""
    rows = [
        [str(number)]
        + [
            text
            for what in ("forward_s", "backward_s", "update_s")
            for text in _pair(getattr(stage.simulated, what), getattr(stage.measured, what))
        ]
        for number, stage in enumerate(comparison.stages)
    ]
    return Table(["stage", "forward", "measured", "backward", "measured", "update", "measured"], rows, "lrrrrrr")


def _worst(error: TimingError) -> str:
    worst = error.worst
    if worst is None:
        return ""
    times = f"{format_seconds(worst.predicted_s)} simulated, {format_seconds(worst.measured_s)} measured"
    return f"{worst.at} of {worst.name} in stage {worst.stage} on worker {worst.rank}: {times}"


def _pair(simulated_s: float, measured_s: float) -> tuple[str, str]:
    error = f" ({simulated_s / measured_s - 1:+.1%})" if measured_s > 0 else ""
    return format_seconds(simulated_s) + error, format_seconds(measured_s)


MOST_ROWS = 32  # workers; more are shown as one row per stage
PEAK = 5  # column of the peak memory


def run_report(summary: Summary, plan: Plan | None = None) -> str:
    """Report a run, and the prediction of `plan` if there is one."""
    parts = [_run_head(summary, plan), worker_table(summary.workers).text()]
    if summary.shared_links:
        rows = [[link.name, percent(link.busy_share)] for link in summary.shared_links]
        parts.append(Table(["shared link", "busy"], rows, "lr").text())
    return "\n\n".join([*parts, legend(summary)])


def _run_head(summary: Summary, plan: Plan | None) -> str:
    run = f"{summary.minibatches} minibatch{'es' * (summary.minibatches > 1)} in {format_seconds(summary.seconds)}"
    rate = summary.samples_per_s_of_run
    predicted = ""
    if plan is not None:
        planned_s = plan.predicted.seconds_per_minibatch
        error = summary.seconds_per_minibatch / planned_s - 1
        predicted = f" (predicted {format_seconds(planned_s)}, {error:+.1%})"
    kinds = [] if plan is None else [plan.cluster.kinds_on(stage.ranks) for stage in plan.stages]
    return named_values(
        [
            ("model", summary.model),
            ("plan", f"{short_config(summary.config)}, {summary.schedule}"),
            *([("stages on", ", ".join(kinds))] if any(kinds) else []),
            (summary.source, pace(summary.samples_per_s, summary.seconds_per_minibatch) + predicted),
            ("whole run", run if rate is None else f"{format_rate(rate)} samples/s, {run}"),
            ("start-up", f"{format_seconds(summary.start_up_s)} until the first backward of stage 0 has ended"),
            ("drain", f"{format_seconds(summary.drain_s)} from the last forward of stage 0"),
            ("bubble", f"{percent(summary.bubble_share)} of the workers' time, {bubble_of_run(summary)}"),
            ("busiest", f"{summary.busiest}, {percent(summary.busiest_share)}"),
        ]
    )


def bubble_of_run(summary: Summary) -> str:
    """Write the bubble of the whole run."""
    return f"{percent(summary.bubble_share_of_run)} with start-up and drain"


def worker_table(workers: Sequence[WorkerUse]) -> Table:
    """Tabulate the workers; if there are many, the largest values of each stage's workers."""
    groups: dict[object, list[WorkerUse]] = {}
    for worker in workers:
        groups.setdefault(worker.rank if len(workers) <= MOST_ROWS else worker.stages, []).append(worker)
    headers = ["worker", "stage", "computes", "sends", "receives", "peak memory", "limit"]
    table = Table(headers, [_use_cells(group) for group in groups.values()], "llrrrrr")
    return table.without("limit") if all(worker.limit_bytes is None for worker in workers) else table


def _use_cells(group: Sequence[WorkerUse]) -> list[str]:
    first, last = group[0].rank, group[-1].rank
    peaks = [worker.peak_bytes for worker in group if worker.peak_bytes is not None]
    limits = [worker.limit_bytes for worker in group if worker.limit_bytes is not None]
    return [
        str(first) if first == last else f"{first}-{last}",
        ", ".join(map(str, group[0].stages)),
        percent(max(worker.compute_share for worker in group)),
        percent(max(worker.send_share for worker in group)),
        percent(max(worker.receive_share for worker in group)),
        format_bytes(max(peaks)) if peaks else "",
        format_bytes(min(limits)) if limits else "",
    ]


def legend(summary: Summary) -> str:
    """Say which part of the run the shares are of."""
    many = "; the largest of each stage's workers" if len(summary.workers) > MOST_ROWS else ""
    if not summary.steady:
        return f"shares of the whole run, which is too short for a steady state{many}"
    times = f"{format_seconds(summary.steady_from_s)} to {format_seconds(summary.steady_to_s)}"
    return f"shares of the time in the steady state, {times}{many}"


def percent(share: float) -> str:
    """Write a share as a percentage with one decimal."""
    return f"{share:.1%}"
