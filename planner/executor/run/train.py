"""Train a plan in a worker process, from its start to its result: a client of the loop."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch.distributed as dist

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.copies import Copies
from planner.executor.checkpoint.recovery import Recovery
from planner.executor.communication.control import control_group, gather_bytes, merge_losses
from planner.executor.handed_model import spec_of
from planner.executor.observe.memory import PeakMemory
from planner.executor.observe.progress import (
    ProgressCallback,
    SteadyState,
    WorkerLog,
    steady_state,
)
from planner.executor.observe.recording import gather_timeline
from planner.executor.observe.run_log import NOTHING
from planner.executor.run.agreement import check_schedule, joined, start_worker, take_place
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.context import PipelineContext
from planner.executor.run.loop import (
    Groups,
    Loop,
    data_position,
    make_checkpointer,
    restorable,
    save_weights,
)
from planner.executor.run.move import arrive, leave
from planner.executor.run.plan_part import Kept, PlanPart
from planner.executor.run.replan import Replanner
from planner.formats.files import replace
from planner.formats.held_folder import remove_abandoned
from planner.formats.late import LateFailure, noting
from planner.formats.plan_parts import Stage, StageMemory
from planner.formats.timeline import Timeline
from planner.plan.rank_groups import sample_parts
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Evaluation, Job, TrainResult, WorkerReport
from planner.workers.supervisor import Supervisor

TimelineCallback = Callable[[Timeline], None]

_NICER = 5  # the thread that computes than those that move messages


def train_worker(
    job: Job,
    on_progress: ProgressCallback | None = None,
    heartbeat: Heartbeat | None = None,
    on_timeline: TimelineCallback | None = None,
    supervisor: Supervisor | None = None,
    recovery: Recovery | None = None,
) -> TrainResult | None:
    """Run this process's part of `job`, or the rest of it after a `recovery`, and return the result
    on rank 0.

    The last stage tells `on_progress` of every update, and rank 0 `on_timeline` of a trace, if the
    job asks for one.
    """
    heartbeat = start_worker(job, heartbeat)
    if job.baseline is not None:
        job = data_parallel(job)
    check_schedule(job.plan)
    place = take_place(job, heartbeat)
    began_s = time.perf_counter()
    with joined(job, heartbeat, supervisor or Supervisor(job, heartbeat)):
        return train(
            pipeline_context(job, spec_of(job), place, heartbeat),
            on_progress,
            on_timeline,
            recovery,
            began_s,
        )


def data_parallel(job: Job) -> Job:
    """Return the baseline of a job: all layers in one stage, replicated by DistributedDataParallel
    on all workers.

    If the plan divides minibatches, the workers share the microbatches of each, which is larger
    than the plan's where that has fewer microbatches than workers. If not, an update averages over
    whole minibatches, one of each worker.
    """
    plan = job.plan
    workers = job.plan.workers
    microbatches = 1
    if plan.microbatches > 1:
        microbatches = max(plan.microbatches, workers)
    sizes = [name for name in StageMemory.model_fields if name.endswith("_bytes")]
    unknown = StageMemory.model_validate(dict.fromkeys(sizes, 0))
    stage = Stage(
        layers=tuple(layer for each in plan.stages for layer in each.layers),
        ranks=tuple(sorted({rank for each in plan.stages for rank in each.ranks})),
        in_flight=1,
        forward_s=0.0,
        backward_s=0.0,
        update_s=0.0,
        memory=unknown,
    )
    one_stage = replace(
        plan,
        config=str(workers),
        schedule=ONE_F_ONE_B if microbatches == 1 else FLUSH,
        microbatches=microbatches,
        stages=(stage,),
        transfers=(),
        shared=(),
    )
    steps = None
    if job.steps is not None:
        steps = -(-job.steps * plan.microbatches // microbatches)
    return replace(job, plan=one_stage, steps=steps)


def train(
    context: PipelineContext,
    on_progress: ProgressCallback | None = None,
    on_timeline: TimelineCallback | None = None,
    recovery: Recovery | None = None,
    began_s: float | None = None,
) -> TrainResult | None:
    """Train in the joined group, and gather on rank 0 what all workers measured.

    Args:
        context: of this worker.
        on_progress: is told of every update by the last stage.
        on_timeline: is told of the trace by rank 0.
        recovery: what to go on from, where hosts may be lost.
        began_s: when the context began to be built, by `time.perf_counter`; None for now.
    """
    if began_s is None:
        began_s = time.perf_counter()
    context.await_models()
    _remove_left_state(context.job)
    # Every worker makes the same process groups, in this order: links, replicas, checkpoints, norm,
    # evaluation.
    groups = Groups.create(context)
    kept = restore(context, recovery)
    replanner = Replanner.of(context)
    part = PlanPart(context, groups, on_progress, replanner)
    part.prepare(kept.first)
    if context.place.kind == "cpu" and sys.platform == "linux":
        _let_messages_interrupt(threading.get_native_id())
    context.heartbeat.enter("waiting for the others to start", meeting=True)
    dist.barrier(control_group())
    trains_s = time.perf_counter()
    if replanner is not None:
        replanner.expect_cost(trains_s - began_s)
    # The stages of a plan that the run leaves must not stay in memory, so nothing here holds them.
    del context, groups
    parts = [part]
    del part
    _train_all(parts, kept, replanner, on_progress)
    (part,) = parts
    context = part.context
    drift = part.drift
    moves = () if replanner is None else tuple(replanner.moves)
    context.heartbeat.enter("waiting for the last worker", meeting=True)
    dist.barrier(control_group())
    seconds = time.perf_counter() - trains_s
    result = gather_result(context, part.loop, part.peak, kept, seconds)
    late: list[LateFailure] = []
    saved_weights: str | None = None
    if context.job.save_weights is not None:
        with noting(late):
            save_weights(context, Path(context.job.save_weights))
            saved_weights = context.job.save_weights

    if kept.checkpointer is not None:
        with noting(late):
            kept.checkpointer.check_last()
    if kept.copies is not None:
        kept.copies.finish()
    if part.recorder is not None:
        context.heartbeat.enter("gathering the trace", meeting=True)
        lengths_of = context.lengths_of if context.lengths else None
        events = () if kept.copies is None else kept.copies.events
        timeline = gather_timeline(
            part.recorder,
            context.plan,
            context.minibatches,
            lengths_of,
            events,
            tuple(map(str, (*drift, *moves))),
        )
        if timeline is not None and on_timeline is not None:
            with noting(late):
                on_timeline(timeline)

    if result is None:
        return None
    return replace(
        result,
        saved_weights=saved_weights,
        drift=drift,
        moves=moves,
        late_failures=tuple(late),
    )


def _remove_left_state(job: Job) -> None:
    """Remove what runs that were killed while they moved left in the memory of this host."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        remove_abandoned(Path(job.elastic.copy_folder))


def _train_all(
    parts: list[PlanPart],
    kept: Kept,
    replanner: Replanner | None,
    on_progress: ProgressCallback | None,
) -> None:
    """Train to the end of the run; `parts` has the one part that trains, and then the last one."""
    at = parts[0].train(kept, kept.first)
    while at < parts[0].context.minibatches:
        assert replanner is not None
        leaving = leave(parts[0], kept, at, replanner)
        if leaving is not None:
            parts.clear()
            parts.append(arrive(leaving, kept, replanner, on_progress))
        at = parts[0].train(kept, at)

    parts[0].finish()


def restore(context: PipelineContext, recovery: Recovery | None = None) -> Kept:
    """Make what keeps the run's state, and go on from the newest one that is there."""
    job = context.job
    checkpointer = None
    copies = None
    on_disk = job.checkpoints.checkpoint_every is not None or job.checkpoints.resume is not None
    if not on_disk and recovery is None:
        return Kept(None, None, 0)
    if on_disk:
        checkpointer = make_checkpointer(context, job.checkpoints)
    if recovery is not None:
        position = data_position(context)
        copies = Copies(job, restorable(context), position, context.heartbeat, recovery)

    first = 0
    past = NOTHING
    # The newest state comes first, and a copy before a checkpoint.
    keepers = [each for each in (copies, checkpointer) if each is not None]
    for keeper in sorted(keepers, key=lambda keeper: -keeper.found):
        first = first or keeper.restore()
        past = keeper.begin(first, past)

    if first > context.minibatches:
        source = "copy"
        if checkpointer is not None:
            source = f"checkpoint '{checkpointer.resumed_from}'"
        raise InputError(
            f"the {source} is of a run of {first} minibatches, and the whole run is to have "
            f"{context.minibatches}",
            hint="`steps` and `epochs` count from the beginning of the first run",
        )

    return Kept(checkpointer, copies, first)


def gather_result(
    context: PipelineContext, loop: Loop, peak: PeakMemory, kept: Kept, seconds: float
) -> TrainResult | None:
    """Gather what all workers measured on rank 0, which returns the result; None elsewhere. All
    workers call it.
    """
    job = context.job
    plan = context.plan
    data = context.data
    place = context.place
    log = loop.worker.log
    stages = loop.worker.stages
    checkpointer, copies, first = kept
    steady = _steady_state_of(context, log)
    first_stage = min(stages, default=None)
    predicted_bytes = 0
    if first_stage is not None:
        predicted_bytes = plan.tensor_bytes(first_stage)
    own = WorkerReport(
        rank=context.rank,
        stage=first_stage,
        busy_share=steady.busy_share,
        # Backwards of all the worker's stages are counted, and each unit has one in every stage.
        samples_per_s=steady.units_per_s * context.microbatch_size / max(1, len(stages)),
        predicted_memory_bytes=predicted_bytes,
        **peak.fields(),
        weight_versions=max(
            (replica.versions.most_versions for replica in stages.values()), default=0
        ),
        deferred_weights=context.deferred,
    )
    reports = [
        WorkerReport.model_validate_json(text)
        for text in gather_bytes(own.model_dump_json().encode())
    ]
    losses = merge_losses(gather_bytes(json.dumps(log.losses).encode()))
    lines = "\n".join(evaluation.model_dump_json() for evaluation in loop.evaluations)
    evaluations = [line for part in gather_bytes(lines.encode()) for line in part.splitlines()]
    if context.rank != 0:
        return None
    if not losses and context.minibatches > first:
        raise PlannerError(
            f"no worker has computed a loss, of {context.minibatches - first} minibatches, so "
            f"nothing was trained, and "
            "no weights are saved",
            hint="solve again, and report this with the plan if that does not help",
        )

    past = next((each.past for each in (copies, checkpointer) if each is not None), NOTHING)
    resumed = None
    if checkpointer is not None:
        resumed = checkpointer.resumed_from
    newest = None if checkpointer is None else checkpointer.newest
    return TrainResult(
        config=plan.config,
        context=plan.context,
        device=place.kind,
        device_name=place.device_name,
        backend=place.backend,
        schedule=job.baseline or plan.schedule.name,
        workers=len(reports),
        minibatches=context.minibatches - first,
        first_minibatch=first,
        minibatch_size=context.minibatch_size,
        samples=sum(
            data.minibatch_size(minibatch) for minibatch in range(first, context.minibatches)
        ),
        seconds=seconds,
        # Every sample passes the last stage once; ranks that divide samples, too, have as many
        # each.
        samples_per_s=sample_parts(job.plan)
        * sum(reports[rank].samples_per_s for rank in plan.stages[-1].ranks),
        predicted_samples_per_s=None if job.baseline is not None else plan.predicted.samples_per_s,
        random_data=data.random,
        losses=(*past.losses, *losses),
        evaluations=(*past.evaluations, *map(Evaluation.model_validate_json, evaluations)),
        reports=tuple(reports),
        resumed_from=None if resumed is None else str(resumed),
        checkpoint=None if newest is None else str(newest),
        checkpoint_s=0.0 if checkpointer is None else checkpointer.seconds,
        restarts=() if copies is None else copies.events,
    )


def _steady_state_of(context: PipelineContext, log: WorkerLog) -> SteadyState:
    """Return what this worker did per second; nothing where the plan leaves it out."""
    if not context.stages:
        return SteadyState(0.0, 0.0)
    shape = context.shape
    per_round = 1
    if not shape.schedule.stashes:
        per_round = sum(len(shape.units_of(stage, context.rank, 0)) for stage in context.stages)
    return steady_state(log.completions, *shape.unsteady(context.rank), per_round)


@cache  # once per thread, however many runs it trains
def _let_messages_interrupt(_thread: int) -> None:
    # Nicer than the threads of gloo, which move what a full socket has not taken at once. On a
    # shared core, Linux lets a woken thread wait until the running one has had its slice, unless
    # that one is nicer: a message then arrives milliseconds late. On Linux `nice` is of the calling
    # thread alone.
    os.nice(_NICER)
