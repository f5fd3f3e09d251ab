"""A run, simulated or measured, for people."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from planner.formats.plan import Plan
from planner.simulator.summary import Summary, WorkerUse
from planner.units import format_bytes, format_rate, format_seconds

MOST_ROWS = 32  # workers; beyond, a row per stage


def run_report(summary: Summary, plan: Plan | None = None) -> str:
    """Pace, bubbles, and how busy and how full every worker is; beside the plan's prediction where there is one."""
    parts = [_head(summary, plan), _worker_table(summary.workers)]
    if summary.shared_links:
        rows = [[link.name, percent(link.busy_share)] for link in summary.shared_links]
        parts.append(tabulate(rows, headers=["shared link", "busy"], colalign=("left", "right")))
    parts.append(legend(summary))
    return "\n\n".join(parts)


def _head(summary: Summary, plan: Plan | None) -> str:
    of = f"{summary.minibatches} minibatch{'es' * (summary.minibatches > 1)} in {format_seconds(summary.seconds)}"
    lines = [
        ("model", summary.model),
        ("plan", f"{summary.config}, {summary.schedule}"),
        (summary.source, f"{pace(summary.samples_per_s, summary.seconds_per_minibatch)}{_against(summary, plan)}"),
        ("whole run", f"{_whole(summary)}{of}"),
        ("", f"first minibatch through after {format_seconds(summary.start_up_s)}, drain {_drain(summary)}"),
        ("bubble", f"{percent(summary.bubble_share)} of the workers' time, {_of_run(summary)}"),
        ("busiest", f"{summary.busiest}, {percent(summary.busiest_share)}"),
    ]
    return tabulate(lines, tablefmt="plain", disable_numparse=True)


def pace(samples_per_s: float | None, seconds_per_minibatch: float) -> str:
    """Samples per second where they are known, and the time of a minibatch."""
    seconds = f"{format_seconds(seconds_per_minibatch)} per minibatch"
    return seconds if samples_per_s is None else f"{format_rate(samples_per_s)} samples/s, {seconds}"


def _against(summary: Summary, plan: Plan | None) -> str:
    if plan is None:
        return ""
    predicted = plan.predicted.seconds_per_minibatch
    return f" (predicted {format_seconds(predicted)}, {summary.seconds_per_minibatch / predicted - 1:+.1%})"


def _whole(summary: Summary) -> str:
    rate = summary.samples_per_s_of_run
    return "" if rate is None else f"{format_rate(rate)} samples/s, "


def _drain(summary: Summary) -> str:
    return f"{format_seconds(summary.drain_s)} from the last forward of stage 0"


def _of_run(summary: Summary) -> str:
    return f"{percent(summary.bubble_share_of_run)} with start-up and drain"


def _worker_table(workers: Sequence[WorkerUse]) -> str:
    headers, rows = worker_cells(workers)
    return tabulate(
        rows, headers=headers, disable_numparse=True, colalign=("left", "left", *["right"] * 5)[: len(headers)]
    )


def worker_cells(workers: Sequence[WorkerUse]) -> tuple[list[str], list[list[str]]]:
    """Headers, and a row per worker; where they are many, per stage: the one that computes most, the fullest."""
    headers = ["worker", "stage", "computes", "sends", "receives", "peak memory", "limit"]
    if len(workers) <= MOST_ROWS:
        rows = [[str(worker.rank), *_cells([worker])] for worker in workers]
    else:
        by_stage: dict[tuple[int, ...], list[WorkerUse]] = {}
        for worker in workers:
            by_stage.setdefault(worker.stages, []).append(worker)
        rows = [[_ranks(group), *_cells(group)] for group in by_stage.values()]
    if all(worker.limit_bytes is None for worker in workers):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    return headers, rows


def _cells(group: Sequence[WorkerUse]) -> list[str]:
    peaks = [worker.peak_bytes for worker in group if worker.peak_bytes is not None]
    limits = [worker.limit_bytes for worker in group if worker.limit_bytes is not None]
    return [
        ", ".join(map(str, group[0].stages)),
        *(
            percent(max(getattr(worker, f"{what}_share") for worker in group))
            for what in ("compute", "send", "receive")
        ),
        format_bytes(max(peaks)) if peaks else "",
        format_bytes(min(limits)) if limits else "",
    ]


def _ranks(group: Sequence[WorkerUse]) -> str:
    return str(group[0].rank) if len(group) == 1 else f"{group[0].rank}-{group[-1].rank}"


def legend(summary: Summary) -> str:
    """Of which time the shares are."""
    many = "; of several workers the largest" if len(summary.workers) > MOST_ROWS else ""
    if not summary.steady:
        return f"shares of the whole run, which is too short for a steady state{many}"
    times = f"{format_seconds(summary.steady_from_s)} to {format_seconds(summary.steady_to_s)}"
    return f"shares of the time in the steady state, {times}{many}"


def percent(share: float) -> str:
    """For people."""
    return f"{share:.1%}"
