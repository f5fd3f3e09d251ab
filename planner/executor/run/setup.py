"""Check what a worker needs before it trains: enough workers, and a plan that cannot deadlock."""

from __future__ import annotations

import os

from planner.errors import PlanError
from planner.formats.groups import of_groups
from planner.formats.plan import Plan
from planner.formats.plan_shape import check_versions, deadlock, shape_of
from planner.schedule.streams.check import ScheduleError, check_streams


def check_world(plan: Plan) -> None:
    """Check that as many processes were started as the plan has workers; raise PlanError when they were not."""
    world, needed = int(os.environ["WORLD_SIZE"]), plan.workers
    if world != needed:
        raise PlanError(
            f"plan '{plan.config}' needs {needed} workers, but {world} were started",
            hint=f"start {needed}: --nnodes times --nproc-per-node of torchrun, or the tasks of srun",
        )


def check_schedule(plan: Plan) -> None:
    """Check that the plan's streams run to their end: those of a plan edited by hand may not.

    Raises:
        PlanError: when they do not.
    """
    depths = [stage.in_flight for stage in plan.stages]
    check_versions(plan.schedule, plan.microbatches, plan.replicas, depths)
    try:
        check_streams(shape_of(of_groups(plan)), minibatches=4 * max(plan.replicas) * max(depths))
    except ScheduleError:
        raise deadlock(plan) from None
