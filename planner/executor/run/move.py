"""Move a run to another plan: the same processes, with other stages, groups and links.

    leave     the old plan, with an empty pipeline: its state goes to the memories of the hosts
    (nobody holds the old stages any more)
    arrive    at the new plan: build its stages, and fill them

What is built is built as at the start of a run, and what is filled is filled as after a restart.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from planner.executor.checkpoint.checkpointer import DataPosition
from planner.executor.checkpoint.handover import Handover, hand_over
from planner.executor.communication.control import control_group
from planner.executor.handed_model import spec_of
from planner.executor.observe.progress import ProgressCallback
from planner.executor.run.agreement import check_schedule
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.loop import Groups, restorable
from planner.executor.run.plan_part import Kept, PlanPart
from planner.executor.run.replan import Replanner
from planner.formats.drift import Drift
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.profiler.this_machine import return_free_pages
from planner.runtime import runtime_of
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Evaluation, Job
from planner.workers.place import Place


@dataclass(frozen=True)
class Leaving:
    """What one worker takes along from one plan to the next."""

    job: Job  # with the next plan
    place: Place
    heartbeat: Heartbeat
    handover: Handover
    losses: Sequence[tuple[int, float]]
    evaluations: Sequence[Evaluation]
    drift: Sequence[Drift]
    began_s: float


def leave(part: PlanPart, kept: Kept, minibatch: int, replanner: Replanner) -> Leaving | None:
    """Leave a plan after `minibatch` minibatches; None where a host has no room for the state, and
    the plan stays. All workers call it.
    """
    began_s = time.perf_counter()
    context = part.context
    after = replanner.next_plan()
    check_schedule(after)
    per_epoch = None if context.data.random else context.data.minibatches(None, 1)
    position = DataPosition(context.minibatch_size, per_epoch)
    handed = hand_over(
        context.job, after, restorable(context), position, minibatch, context.heartbeat
    )
    if isinstance(handed, str):
        replanner.stays(handed)
        return None

    part.finish()
    for keeper in kept.keepers:
        keeper.go_on_with(context.job, [])  # or the old stages would stay in memory
    return Leaving(
        job=replace(context.job, plan=after),
        place=context.place,
        heartbeat=context.heartbeat,
        handover=handed,
        losses=part.loop.worker.log.losses,
        evaluations=part.loop.evaluations,
        drift=part.drift,
        began_s=began_s,
    )


def arrive(
    leaving: Leaving, kept: Kept, replanner: Replanner, on_progress: ProgressCallback | None
) -> PlanPart:
    """Build the stages of the next plan and fill them; return the part that trains by it. All
    workers call it.
    """
    gc.collect()
    return_free_pages()
    runtime_of(leaving.place.compute).empty_cache()

    job = leaving.job
    heartbeat = leaving.heartbeat
    heartbeat.hold(_first_stage(job.plan))
    heartbeat.enter("building its stages of another plan")
    context = pipeline_context(job, spec_of(job), leaving.place, heartbeat)
    context.await_models()
    groups = Groups.create(context)
    stages = restorable(context)
    leaving.handover.restore(job, stages)
    for keeper in kept.keepers:
        keeper.go_on_with(job, stages)

    part = PlanPart(context, groups, on_progress, replanner)
    part.go_on_from(leaving.losses, leaving.evaluations, leaving.drift)
    part.prepare(leaving.handover.minibatch)
    leaving.handover.finish()
    heartbeat.enter("waiting for the others to move", meeting=True)
    dist.barrier(control_group())
    seconds = time.perf_counter() - leaving.began_s
    replanner.moved(job.plan, leaving.handover.minibatch, seconds)
    return part


def _first_stage(plan: Plan) -> int | None:
    """Return the first stage that this worker has under a plan; None where that leaves it out."""
    rank = dist.get_rank()
    return next((number for number, stage in enumerate(plan.stages) if rank in stage.ranks), None)
