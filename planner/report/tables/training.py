"""The report of a training run: predicted and measured numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from planner.formats.plan_parts import short_config
from planner.report.tables.table import Table, named_values
from planner.units import format_bytes

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
