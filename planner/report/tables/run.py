"""The tables of a run, simulated or measured: pace, bubble, and how busy and how full every worker is."""

from __future__ import annotations

from collections.abc import Sequence

from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.report.tables.plan import pace
from planner.report.tables.table import Table, named_values
from planner.simulator.summary import Summary, WorkerUse
from planner.units import format_bytes, format_rate, format_seconds

MOST_ROWS = 32  # workers; more are shown as one row per stage
PEAK = 5  # column of the peak memory


def run_report(summary: Summary, plan: Plan | None = None) -> str:
    """Report a run, and the prediction of `plan` if there is one."""
    parts = [_head(summary, plan), worker_table(summary.workers).text()]
    if summary.shared_links:
        rows = [[link.name, percent(link.busy_share)] for link in summary.shared_links]
        parts.append(Table(["shared link", "busy"], rows, "lr").text())
    return "\n\n".join([*parts, legend(summary)])


def _head(summary: Summary, plan: Plan | None) -> str:
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
    table = Table(headers, [_cells(group) for group in groups.values()], "llrrrrr")
    return table.without("limit") if all(worker.limit_bytes is None for worker in workers) else table


def _cells(group: Sequence[WorkerUse]) -> list[str]:
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
