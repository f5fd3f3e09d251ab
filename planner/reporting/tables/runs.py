"""The tables of a run: simulated, measured, one compared with the other, and trained."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from planner.analysis.compare_runs import RunComparison
from planner.analysis.measured_cluster import MeasuredCluster
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import Prediction, config_words
from planner.formats.timeline import Timeline
from planner.reporting.tables.plan import pace, update_line
from planner.reporting.tables.table import Table, named_values, optional_text, table_of
from planner.simulator.simulate_plan import simulated_s
from planner.simulator.summary import Summary, WorkerUse, summarize
from planner.units import format_bandwidth, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from planner.workers.job import Evaluation, Loss, TrainResult, WorkerReport

LOSS_WINDOW = 10  # minibatches averaged at either end, because single losses are noisy
SAME_PACE = 0.02  # plans nearer than this are equally fast, because predictions err by as much
_LEAST_SHARE = 0.0005  # of the time, for a cause of waiting to be named
MOST_ROWS = 32  # workers; of more the first of each stage is shown


def training_report(result: "TrainResult") -> str:
    """Report throughput, workers, loss and evaluations."""
    parts = [named_values(_training_lines(result)), workers_table(result.reports), _loss(result)]
    if result.evaluations:
        parts.append(_evaluation_words(result.evaluations))
    return "\n\n".join(parts)


def _evaluation_words(evaluations: "Sequence[Evaluation]") -> str:
    """Write the last evaluation, and the best where that is another one."""
    last = evaluations[-1]
    words = f"evaluation on {last.samples} samples: {last}"

    best = min(evaluations, key=lambda each: _loss_or(each.loss, math.inf))
    if best is not last:
        words += f"\nbest after minibatch {best.minibatch}: {best}"
    return words


def _loss_or(loss: float | None, value: float) -> float:
    """Return a loss, or `value` for None, which stands for one that is not finite."""
    if loss is None:
        return value
    return loss


def _training_lines(result: "TrainResult") -> list[tuple[str, str | None]]:
    samples = f"{result.minibatches} of {result.minibatch_size} samples"
    return [
        ("config", config_words(result.config, result.context or 1)),
        ("schedule", str(result.schedule)),
        ("device", _device_words(result)),
        ("minibatches", f"{samples} in {result.seconds:.1f} s"),
        ("measured", _measured_words(result)),
        ("predicted", _predicted_words(result)),
        ("weights", _deferred_words(result)),
        *(("restarted", f"after {reason}") for reason in result.restarts),
        *(("not as planned", str(drift)) for drift in result.drift),
        *(("moved", str(move)) for move in result.moves),
        ("resumed from", _resumed_words(result)),
        ("checkpoint", result.checkpoint),
        ("weights", result.saved_weights),
    ]


def _device_words(result: "TrainResult") -> str | None:
    if result.device is None:
        return None
    name = ""
    if result.device_name is not None:
        name = f" ({result.device_name})"
    return f"{result.device}{name}, messages over {result.backend}"


def _measured_words(result: "TrainResult") -> str:
    if not result.samples_per_s:
        return "too few minibatches to measure"
    return f"{result.samples_per_s:.1f} samples/s in steady state"


def _predicted_words(result: "TrainResult") -> str | None:
    expected = result.predicted_samples_per_s
    if expected is None:
        return None
    words = f"{expected:.1f} samples/s"
    if result.samples_per_s:
        words += f" ({percent_error(expected, result.samples_per_s)})"
    return words


def _deferred_words(result: "TrainResult") -> str | None:
    """Say how many workers made the weights of their own stage alone."""
    deferred = sum(report.deferred_weights for report in result.reports)
    if not deferred:
        return None
    return f"made stage by stage: {deferred} of {result.workers} workers made only their own"


def _resumed_words(result: "TrainResult") -> str | None:
    if result.resumed_from is None:
        return None
    return f"{result.resumed_from}, minibatch {result.first_minibatch}"


def percent_error(predicted: float, measured: float) -> str:
    """Write the signed error of a prediction, relative to the measurement."""
    if not measured:
        return "-"
    error = (predicted - measured) / measured
    # A sign of nothing would say nothing.
    if not round(error, 3):
        return "0.0%"
    return f"{error:+.1%}"


def workers_table(reports: "Sequence[WorkerReport]") -> str:
    """Write what each worker measured."""
    on_gpus = any(report.used_memory_bytes is not None for report in reports)
    rows = [
        {
            "worker": report.rank,
            "stage": "left out" if report.stage is None else report.stage,
            "busy": f"{report.busy_share:.0%}",
            "peak memory predicted": format_bytes(report.predicted_memory_bytes or 0),
            "measured": format_bytes(report.peak_memory_bytes),
            "reserved": format_bytes(report.reserved_memory_bytes or 0) if on_gpus else None,
            "used of the GPU": format_bytes(report.used_memory_bytes or 0) if on_gpus else None,
            "weight versions": report.weight_versions,
        }
        for report in reports
    ]
    return table_of(rows).text()


def loss_ends(losses: "tuple[Loss, ...]") -> tuple[float, float, int]:
    """Return the mean losses of the first and of the last minibatches, and of how many minibatches
    they are.
    """
    window = max(1, min(LOSS_WINDOW, len(losses) // 2))
    values = [_loss_or(entry.loss, math.nan) for entry in losses]
    first = sum(values[:window]) / window
    last = sum(values[-window:]) / window
    return first, last, window


def _loss(result: "TrainResult") -> str:
    if result.random_data:
        return (
            "Trained on random batches: the model file has no dataset(), so the loss means nothing."
        )

    diverged = next((entry.minibatch for entry in result.losses if entry.loss is None), None)
    if diverged is not None:
        return f"The loss is not finite from minibatch {diverged} on: lower the learning rate."
    if not result.losses:
        return "No minibatch was left to train: the checkpoint is from the end of the run."
    first, last, window = loss_ends(result.losses)
    if len(result.losses) == 1:
        return f"loss {first:.4f}"
    ends = "first and last minibatch"
    if window > 1:
        ends = f"means of the first and the last {window} minibatches"
    return f"loss {first:.4f} -> {last:.4f} ({ends})"


def run_comparison_report(comparison: RunComparison, plan: Plan) -> str:
    """Report the pace of both runs, and the stages' times."""
    return f"{pace_table(comparison, plan).text()}\n\n{stage_times_table(comparison).text()}"


def pace_table(comparison: RunComparison, plan: Plan) -> Table:
    """Compare pace, bubble and lengths as planned, simulated and measured."""
    simulated = comparison.simulated
    measured = comparison.measured
    rows = [
        _pace_row(plan.predicted, simulated, measured),
        _error_row(plan.predicted, simulated, measured),
        ["bubble", "", f"{simulated.bubble_share:.1%}", f"{measured.bubble_share:.1%}"],
        _seconds_row("whole run", simulated.seconds, measured.seconds),
        _seconds_row("start-up", simulated.start_up_s, measured.start_up_s),
        _seconds_row("drain", simulated.drain_s, measured.drain_s),
    ]
    return Table(["", "plan", "simulated", "measured"], rows, "lrrr")


def _pace_row(predicted: Prediction, simulated: Summary, measured: Summary) -> list[str]:
    runs = (predicted, simulated, measured)
    return ["pace", *(pace(run.samples_per_s, run.seconds_per_minibatch) for run in runs)]


def _error_row(predicted: Prediction, simulated: Summary, measured: Summary) -> list[str]:
    measured_s = measured.seconds_per_minibatch
    return [
        "time, relative to measured",
        percent_error(predicted.seconds_per_minibatch, measured_s),
        percent_error(simulated.seconds_per_minibatch, measured_s),
        "",
    ]


def _seconds_row(name: str, simulated_s: float, measured_s: float) -> list[str]:
    return [name, "", format_seconds(simulated_s), format_seconds(measured_s)]


def stage_times_table(comparison: RunComparison) -> Table:
    """List the mean times of each stage, simulated and measured."""
    rows: list[list[str]] = []
    for number, stage in enumerate(comparison.stages):
        rows.append([str(number)])
        for what in ("forward_s", "backward_s", "update_s"):
            simulated_s = getattr(stage.simulated, what)
            measured_s = getattr(stage.measured, what)
            error = ""
            if measured_s > 0:
                error = f" ({percent_error(simulated_s, measured_s)})"
            rows[-1] += [format_seconds(simulated_s) + error, format_seconds(measured_s)]

    return Table(
        ["stage", "forward", "measured", "backward", "measured", "update", "measured"],
        rows,
        "lrrrrrr",
    )


def timeline_report(timeline: Timeline) -> str:
    return run_report(summarize(timeline))


def run_report(summary: Summary, plan: Plan | None = None) -> str:
    """Report a run, and the prediction of `plan` if there is one."""
    parts = [named_values(_run_lines(summary, plan)), worker_table(summary.workers).text()]
    if summary.shared_links:
        rows = [[link.name, f"{link.busy_share:.1%}"] for link in summary.shared_links]
        parts.append(Table(["shared link", "busy"], rows, "lr").text())
    return "\n\n".join([*parts, legend(summary)])


def _run_lines(summary: Summary, plan: Plan | None) -> list[tuple[str, str | None]]:
    own_pace = pace(summary.samples_per_s, summary.seconds_per_minibatch)
    start_up = format_seconds(summary.start_up_s)
    return [
        ("model", summary.model),
        ("plan", f"{config_words(summary.config)}, {summary.schedule}"),
        ("stages on", _kinds_words(plan)),
        ("update", None if plan is None else update_line(plan)),
        (summary.source, f"{own_pace}{_prediction_words(summary, plan)}"),
        ("whole run", _whole_run_words(summary)),
        ("start-up", f"{start_up} until the first backward of stage 0 has ended"),
        ("drain", f"{format_seconds(summary.drain_s)} from the last forward of stage 0"),
        (
            "bubble",
            f"{summary.bubble_share:.1%} of the workers' time, "
            f"{summary.bubble_share_of_run:.1%} with start-up and drain",
        ),
        ("waiting for", bubble_causes(summary)),
        ("lengths", _uneven_words(plan)),
        ("busiest", f"{summary.busiest}, {summary.busiest_share:.1%}"),
    ]


def _kinds_words(plan: Plan | None) -> str | None:
    """List the kinds of GPUs of each stage; None where there is one kind."""
    if plan is None:
        return None
    kinds = [plan.cluster.kinds_on(stage.ranks) for stage in plan.stages]
    if not any(kinds):
        return None
    return ", ".join(kinds)


def _prediction_words(summary: Summary, plan: Plan | None) -> str:
    if plan is None:
        return ""
    planned_s = plan.predicted.seconds_per_minibatch
    error = percent_error(summary.seconds_per_minibatch, planned_s)
    return f" (predicted {format_seconds(planned_s)}, {error})"


def _whole_run_words(summary: Summary) -> str:
    ending = ""
    if summary.minibatches > 1:
        ending = "es"
    run = f"{summary.minibatches} minibatch{ending} in {format_seconds(summary.seconds)}"

    rate = summary.samples_per_s_of_run
    if rate is None:
        return run
    return f"{format_rate(rate)} samples/s, {run}"


def _uneven_words(plan: Plan | None) -> str | None:
    """Say how much longer a minibatch takes than one whose microbatches are alike."""
    if plan is None or plan.lengths is None:
        return None
    alike_s = simulated_s(replace(plan, lengths=None))
    longer = percent_error(plan.predicted.seconds_per_minibatch, alike_s)
    return f"{longer} of time per minibatch, because microbatches differ"


def bubble_causes(summary: Summary) -> str | None:
    """Say what workers wait for; None where they do not."""
    words = [
        f"{cause} {share:.1%}"
        for cause, share in summary.bubble_causes.items()
        if share >= _LEAST_SHARE
    ]
    return ", ".join(words) or None


def worker_table(workers: Sequence[WorkerUse], measured: Sequence[WorkerUse] = ()) -> Table:
    """Tabulate the workers, or of many the first of each stage, with the peaks that were
    measured.
    """
    if len(workers) > MOST_ROWS:
        workers = _first_of_stages(workers)
    peaks = {worker.rank: worker.peak_bytes for worker in measured}
    rows = [_worker_cells(worker, peaks.get(worker.rank)) for worker in workers]
    return table_of(list(_merged(rows)), "llrrrrrr")


def _first_of_stages(workers: Sequence[WorkerUse]) -> list[WorkerUse]:
    """Return the first worker of those that have the same stages."""
    first: dict[tuple[int, ...], WorkerUse] = {}
    for worker in workers:
        first.setdefault(worker.stages, worker)
    return list(first.values())


def _worker_cells(worker: WorkerUse, measured_bytes: int | None) -> dict[str, str | None]:
    return {
        "worker": f"{worker.rank}",
        "stage": ", ".join(map(str, worker.stages)),
        "computes": f"{worker.compute_share:.1%}",
        "sends": f"{worker.send_share:.1%}",
        "receives": f"{worker.receive_share:.1%}",
        "peak memory": format_bytes(worker.peak_bytes or 0),
        "limit": optional_text(worker.limit_bytes, format_bytes),
        "measured peak": optional_text(measured_bytes or None, format_bytes),
    }


def _merged(rows: Sequence[dict[str, str | None]]) -> Iterator[dict[str, str | None]]:
    """Yield rows, of neighbours that are equal but for the worker one: "0-3"."""

    def use(row: dict[str, str | None]) -> list[str | None]:
        return [value for name, value in row.items() if name != "worker"]

    for _, alike in groupby(rows, key=use):
        first, *others = alike
        workers = first["worker"]
        if others:
            workers = f"{workers}-{others[-1]['worker']}"
        yield first | {"worker": workers}


def legend(summary: Summary) -> str:
    """Say which part of the run the shares are of."""
    many = ""
    if len(summary.workers) > MOST_ROWS:
        many = "; of the first worker of each stage"
    if not summary.steady:
        return f"shares of the whole run, which is too short for a steady state{many}"
    times = f"{format_seconds(summary.steady_from_s)} to {format_seconds(summary.steady_to_s)}"
    return f"shares of the time in the steady state, {times}{many}"


def measured_cluster_sentences(plan: Plan, found: MeasuredCluster) -> Iterator[str]:
    """Yield what a run measured of devices and links that the plan's cluster has otherwise."""
    planned = plan.cluster
    levels = found.cluster.levels
    if found.cluster == planned:
        yield "devices and links are as fast as planned"

    stages = {rank: number for number, stage in enumerate(plan.stages) for rank in stage.ranks}
    for worker in found.workers:
        if _speed_of(found.cluster, worker.rank) != _speed_of(planned, worker.rank):
            yield (
                f"worker {worker.rank} (stage {stages[worker.rank]}) takes "
                f"{1 / worker.speed:.2f} times as long as planned for its computations"
            )

    for number, (before, now) in enumerate(zip(planned.levels, levels, strict=True)):
        if before != now:
            where = "links"
            if len(levels) != 1:
                where = f"links of level {number}"
            yield (
                f"{where} carry {format_bandwidth(now.bandwidth_bytes_per_s)}, and "
                f"{format_bandwidth(before.bandwidth_bytes_per_s)} was planned"
            )

    if all(link.measured_bytes_per_s is None for link in found.links) and planned.gpus > 1:
        yield "no message tells how fast links are, so they are as planned"


def _speed_of(cluster: Cluster, rank: int) -> float:
    if not cluster.kinds:
        return 1.0
    return cluster.kind_of(rank).speed


def gain_sentence(before: Plan, after: Plan) -> str:
    """Say how much faster one plan is than another of the same profile on the same cluster."""
    ratio = _seconds_per_microbatch(before) / _seconds_per_microbatch(after)
    if ratio <= 1 + SAME_PACE:
        return f"the plan that was run, {before.config}, is as fast there as any that was found"
    return (
        f"{after.config} is {ratio:.2f} times as fast there as the plan that was run, "
        f"{before.config} (simulated)"
    )


def _seconds_per_microbatch(plan: Plan) -> float:
    return plan.predicted.seconds_per_minibatch / plan.microbatches
