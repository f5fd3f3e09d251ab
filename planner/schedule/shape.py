"""A plan as the schedules see it."""

from __future__ import annotations

from planner.plan_file import Plan
from planner.schedule.streams import Channel, PipelineShape


def shape_of(plan: Plan) -> PipelineShape:
    """Who runs which stage, and who exchanges what with whom."""
    return PipelineShape(
        ranks=tuple(stage.ranks for stage in plan.stages),
        channels=tuple(Channel(t.source, t.target, t.gradient_bytes > 0) for t in plan.transfers),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        depths=tuple(stage.in_flight for stage in plan.stages),
        vertical_sync=plan.vertical_sync,
        shared=shared_pairs(plan),
    )


def shared_pairs(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The pairs of stages that share weights; none where the plan cannot be trained because of them."""
    pairs = tuple(shared.stages for shared in plan.shared)
    uneven = plan.schedule == "1f1b" and any(len({plan.stages[s].replicas for s in pair}) > 1 for pair in pairs)
    return () if uneven or plan.vertical_sync else pairs
