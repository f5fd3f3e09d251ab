"""The tables of a run: simulated, measured, one compared with the other, and trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.analysis.compare_runs import RunComparison, TimingError
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.formats.timeline import Timeline
from planner.reporting.tables.plan import pace
from planner.reporting.tables.table import Table, named_values, table_of
from planner.simulator.summary import Summary, WorkerUse, summarize
from planner.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from planner.workers.job import Loss, TrainResult, WorkerReport

LOSS_WINDOW = 10  # minibatches averaged at either end, because single losses are noisy
MOST_ROWS = 32  # workers; more are shown as one row per stage


def training_report(result: TrainResult) -> str:
    """Report throughput, workers, loss and evaluations."""
    parts = [named_values(_training_lines(result)), workers_table(result.reports), _loss(result)]
    if result.evaluations:
        last = result.evaluations[-1]
        best = min(result.evaluations, key=lambda each: math.inf if each.loss is None else each.loss)
        parts.append(f"evaluation on {last.samples} samples: {last}")
        if best is not last:
            parts[-1] += f"\nbest after minibatch {best.minibatch}: {best}"
    return "\n\n".join(parts)


def _training_lines(result: TrainResult) -> list[tuple[str, str | None]]:
    measured, start = result.samples_per_s, result.synchronous_start
    predicted = _against(result.predicted_samples_per_s, measured)
    name = f" ({result.device_name})" if result.device_name is not None else ""
    begun = deferred = resumed = None
    if start is not None:
        expected = _against(start.predicted_samples_per_s, start.samples_per_s)
        how = f"the first {start.minibatches} minibatches, {start.schedule} with {start.microbatches} microbatches"
        begun = f"{how}: {start.samples_per_s:.1f} samples/s" + (f", predicted {expected}" if expected else "")
    if own := sum(report.deferred_weights for report in result.reports):
        deferred = f"made stage by stage: {own} of {result.workers} workers made only their own"
    if result.resumed_from is not None:
        resumed = f"{result.resumed_from}, minibatch {result.first_minibatch}"
    return [
        ("config", short_config(result.config)),
        ("schedule", str(result.schedule)),
        ("device", None if result.device is None else f"{result.device}{name}, messages over {result.backend}"),
        ("minibatches", f"{result.minibatches} of {result.minibatch_size} samples in {result.seconds:.1f} s"),
        ("measured", f"{measured:.1f} samples/s in steady state" if measured else "too few minibatches to measure"),
        ("predicted", predicted),
        ("synchronous start", begun),
        ("likely cause", result.likely_cause),
        ("weights", deferred),
        *(("restarted", f"after {reason}") for reason in result.restarts),
        ("resumed from", resumed),
        ("checkpoint", result.checkpoint),
        ("weights", result.saved_weights),
    ]


def _against(predicted: float | None, measured: float) -> str | None:
    """Write a predicted rate and its error."""
    return None if predicted is None else f"{predicted:.1f} samples/s ({percent_error(predicted, measured)})"


def percent_error(predicted: float, measured: float) -> str:
    """Write the signed error of a prediction, relative to the measurement."""
    return f"{(predicted - measured) / measured:+.1%}" if measured else "-"


def workers_table(reports: Sequence[WorkerReport]) -> str:
    """Write what each worker measured."""
    on_gpus = any(report.used_memory_bytes is not None for report in reports)
    rows = [
        {
            "worker": report.rank,
            "stage": report.stage,
            "busy": f"{report.busy_share:.0%}",
            "peak memory predicted": _bytes_or_dash(report.predicted_memory_bytes),
            "measured": format_bytes(report.peak_memory_bytes),
            "reserved": _bytes_or_dash(report.reserved_memory_bytes) if on_gpus else None,
            "used of the GPU": _bytes_or_dash(report.used_memory_bytes) if on_gpus else None,
            "weight versions": report.weight_versions,
        }
        for report in reports
    ]
    return table_of(rows).text()


def _bytes_or_dash(count: int | None) -> str:
    return format_bytes(count) if count else "-"


def loss_ends(losses: tuple[Loss, ...]) -> tuple[float, float, int]:
    """Average the losses of the first and of the last minibatches; return the means, and of how many they are."""
    window = max(1, min(LOSS_WINDOW, len(losses) // 2))
    values = [math.nan if entry.loss is None else entry.loss for entry in losses]
    return sum(values[:window]) / window, sum(values[-window:]) / window, window


def _loss(result: TrainResult) -> str:
    if result.random_data:
        return "Trained on random batches: the model file has no dataset(), so the loss means nothing."
    diverged = next((entry.minibatch for entry in result.losses if entry.loss is None), None)
    if diverged is not None:
        return f"The loss is not finite from minibatch {diverged} on: lower the learning rate."
    if not result.losses:
        return "No minibatch was left to train: the checkpoint is from the end of the run."
    first, last, window = loss_ends(result.losses)
    return f"loss {first:.4f} -> {last:.4f} (means of the first and the last {window} minibatches)"


def run_comparison_report(comparison: RunComparison, plan: Plan) -> str:
    """Report the pace of both runs, the timing errors of events, and the stages' times."""
    times = timing_table(comparison).text(), stage_times_table(comparison).text()
    return "\n\n".join((pace_table(comparison, plan).text(), "\n".join(timing_notes(comparison)), *times))


def pace_table(comparison: RunComparison, plan: Plan) -> Table:
    """Compare pace, bubble and lengths as planned, simulated and measured."""
    predicted, runs = plan.predicted, (comparison.simulated, comparison.measured)
    paces = [pace(each.samples_per_s, each.seconds_per_minibatch) for each in (predicted, *runs)]
    measured_s = comparison.measured.seconds_per_minibatch
    errors = [f"{each.seconds_per_minibatch / measured_s - 1:+.1%}" for each in (predicted, comparison.simulated)]
    rows = [
        ["pace", *paces],
        ["time, relative to measured", *errors, ""],
        ["bubble", "", *(percent(run.bubble_share) for run in runs)],
        ["whole run", "", *(format_seconds(run.seconds) for run in runs)],
        ["start-up", "", *(format_seconds(run.start_up_s) for run in runs)],
        ["drain", "", *(format_seconds(run.drain_s) for run in runs)],
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
    rows: list[list[str]] = []
    for number, stage in enumerate(comparison.stages):
        rows.append([str(number)])
        for what in ("forward_s", "backward_s", "update_s"):
            simulated_s, measured_s = getattr(stage.simulated, what), getattr(stage.measured, what)
            error = f" ({simulated_s / measured_s - 1:+.1%})" if measured_s > 0 else ""
            rows[-1] += [format_seconds(simulated_s) + error, format_seconds(measured_s)]
    return Table(["stage", "forward", "measured", "backward", "measured", "update", "measured"], rows, "lrrrrrr")


def _worst(error: TimingError) -> str:
    if (worst := error.worst) is None:
        return ""
    times = f"{format_seconds(worst.predicted_s)} simulated, {format_seconds(worst.measured_s)} measured"
    return f"{worst.at} of {worst.name} in stage {worst.stage} on worker {worst.rank}: {times}"


def timeline_report(timeline: Timeline) -> str:
    """Report what a run's workers and links did."""
    return run_report(summarize(timeline))


def run_report(summary: Summary, plan: Plan | None = None) -> str:
    """Report a run, and the prediction of `plan` if there is one."""
    parts = [named_values(_run_lines(summary, plan)), worker_table(summary.workers).text()]
    if summary.shared_links:
        rows = [[link.name, percent(link.busy_share)] for link in summary.shared_links]
        parts.append(Table(["shared link", "busy"], rows, "lr").text())
    return "\n\n".join([*parts, legend(summary)])


def _run_lines(summary: Summary, plan: Plan | None) -> list[tuple[str, str | None]]:
    run = f"{summary.minibatches} minibatch{'es' * (summary.minibatches > 1)} in {format_seconds(summary.seconds)}"
    rate, predicted, kinds = summary.samples_per_s_of_run, "", [""]
    if plan is not None:
        planned_s = plan.predicted.seconds_per_minibatch
        error = summary.seconds_per_minibatch / planned_s - 1
        predicted = f" (predicted {format_seconds(planned_s)}, {error:+.1%})"
        kinds = [plan.cluster.kinds_on(stage.ranks) for stage in plan.stages]
    return [
        ("model", summary.model),
        ("plan", f"{short_config(summary.config)}, {summary.schedule}"),
        ("stages on", ", ".join(kinds) if any(kinds) else None),
        (summary.source, pace(summary.samples_per_s, summary.seconds_per_minibatch) + predicted),
        ("whole run", run if rate is None else f"{format_rate(rate)} samples/s, {run}"),
        ("start-up", f"{format_seconds(summary.start_up_s)} until the first backward of stage 0 has ended"),
        ("drain", f"{format_seconds(summary.drain_s)} from the last forward of stage 0"),
        ("bubble", f"{percent(summary.bubble_share)} of the workers' time, {bubble_of_run(summary)}"),
        ("busiest", f"{summary.busiest}, {percent(summary.busiest_share)}"),
    ]


def bubble_of_run(summary: Summary) -> str:
    """Write the bubble of the whole run."""
    return f"{percent(summary.bubble_share_of_run)} with start-up and drain"


def worker_table(workers: Sequence[WorkerUse], measured: Sequence[WorkerUse] = ()) -> Table:
    """Tabulate the workers, with the peaks that were measured; of many, the largest values of each stage's workers."""
    groups: dict[object, list[WorkerUse]] = {}
    for worker in workers:
        groups.setdefault(worker.rank if len(workers) <= MOST_ROWS else worker.stages, []).append(worker)
    measured_peaks = {worker.rank: worker.peak_bytes for worker in measured}
    return table_of([_use_cells(group, measured_peaks) for group in groups.values()], "llrrrrrr")


def _use_cells(group: Sequence[WorkerUse], measured_peaks: dict[int, int | None]) -> dict[str, str | None]:
    first, last = group[0].rank, group[-1].rank
    peaks = [worker.peak_bytes for worker in group if worker.peak_bytes is not None]
    limits = [worker.limit_bytes for worker in group if worker.limit_bytes is not None]
    measured = [peak for worker in group if (peak := measured_peaks.get(worker.rank)) is not None]
    return {
        "worker": str(first) if first == last else f"{first}-{last}",
        "stage": ", ".join(map(str, group[0].stages)),
        "computes": percent(max(worker.compute_share for worker in group)),
        "sends": percent(max(worker.send_share for worker in group)),
        "receives": percent(max(worker.receive_share for worker in group)),
        "peak memory": format_bytes(max(peaks)) if peaks else "",
        "limit": format_bytes(min(limits)) if limits else None,
        "measured peak": format_bytes(max(measured)) if measured else None,
    }


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
