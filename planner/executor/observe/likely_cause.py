"""Say why a run was slower than its plan predicts, as far as what the workers measured tells."""

from __future__ import annotations

from collections.abc import Sequence

from planner.executor.job import WorkerReport
from planner.formats.plan import Plan

WORTH_SAYING = 0.15  # a run this much slower than predicted wants a reason
_SLOWER = 1.1  # computing this much slower than profiled is a reason


def likely_cause(
    plan: Plan, reports: Sequence[WorkerReport], predicted_samples_per_s: float, measured_samples_per_s: float
) -> str | None:
    """Return the likeliest cause; None where the run was about as fast as predicted."""
    if not measured_samples_per_s or predicted_samples_per_s < measured_samples_per_s * (1 + WORTH_SAYING):
        return None
    assert plan.minibatch_size is not None
    measured_s = plan.minibatch_size / measured_samples_per_s
    slower = max(report.busy_share * measured_s / _compute_s(plan, report.rank) for report in reports)
    if slower < _SLOWER:
        return (
            "workers computed as fast as profiled and waited longer for messages: the links are slower than the "
            "cluster says, or others use them; plan profile measures them with `links`"
        )
    computed = f"stages computed {slower - 1:.0%} slower than profiled"
    alone = plan.device.kind == "cpu" and (plan.device.processes or 1) == 1
    if alone and plan.workers > 1:
        return (
            f"{computed}: the profile is of one process alone, and workers that share a host's cores and memory slow "
            f"each other down; profile again with `processes={plan.workers}` if they share one"
        )
    return f"{computed}: something else uses the devices, or they run at another clock; profile again"


def _compute_s(plan: Plan, rank: int) -> float:
    """Return the seconds that a worker computes per minibatch by the profile."""
    return sum(plan.computing_s(stage) / len(stage.ranks) for stage in plan.stages if rank in stage.ranks)
