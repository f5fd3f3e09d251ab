"""Train a plan in a worker process, from its start to its result: a client of the loop."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.checkpointer import Checkpointer, DataPosition
from planner.executor.checkpoint.copies import Copies
from planner.executor.checkpoint.recovery import Recovery
from planner.executor.communication.control import control_group, gather_bytes, merge_losses
from planner.executor.handed_model import spec_of
from planner.executor.observe.memory import PeakMemory
from planner.executor.observe.progress import (
    ProgressCallback,
    Reporter,
    WorkerLog,
    hook,
    steady_state,
)
from planner.executor.observe.recording import TraceRecorder, gather_timeline
from planner.executor.observe.run_log import NOTHING
from planner.executor.observe.untouched import TrainedState
from planner.executor.run.agreement import check_schedule, joined, start_worker, take_place
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.context import PipelineContext
from planner.executor.run.data import MOST_RANDOM, RANDOM_BATCHES
from planner.executor.run.drift_watch import watch_of
from planner.executor.run.evaluator import evaluation_points
from planner.executor.run.loop import Groups, Loop, make_checkpointer, restorable, save_weights
from planner.executor.run.worker import Observers
from planner.formats.files import replace
from planner.formats.late import LateFailure, noting
from planner.formats.plan_parts import Stage, StageMemory
from planner.formats.timeline import Timeline
from planner.model.tensor.division import own_memory
from planner.plan.rank_groups import sample_parts
from planner.schedule.instructions import Forward, Instruction, Unit, Update
from planner.schedule.one_stage import FLUSH, ONE_F_ONE_B
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Evaluation, Job, TrainResult, WorkerReport
from planner.workers.supervisor import Supervisor

TimelineCallback = Callable[[Timeline], None]

_NICER = 5  # the thread that computes than those that move messages


class Kept(NamedTuple):
    """What keeps the run's state, and how many of its minibatches were done before."""

    checkpointer: Checkpointer | None
    copies: Copies | None
    first: int


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
    with joined(job, heartbeat, supervisor or Supervisor(job, heartbeat)):
        context = pipeline_context(job, spec_of(job), place, heartbeat)
        return train(context, on_progress, on_timeline, recovery)


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
) -> TrainResult | None:
    """Train in the joined group, and gather on rank 0 what all workers measured."""
    options = context.job.run_options
    place = context.place
    context.await_models()
    # Every worker makes the same process groups, in this order: links, replicas, checkpoints, norm,
    # evaluation.
    groups = Groups.create(context)
    kept = restore(context, recovery)
    checkpointer, copies, first = kept
    reporter = None
    last_stage = len(context.plan.stages) - 1
    if context.is_first_replica(last_stage) and context.leads_tensor_group:  # one worker reports
        user_hook = hook(context.spec, _trained_state(context))
        callbacks = [each for each in (on_progress, user_hook) if each is not None]
        per_update = context.shape.minibatches_per_update(last_stage)
        if callbacks:
            reporter = Reporter(callbacks, context.minibatches, per_update, context.minibatch_size)

    def on_update(update: Update, log: WorkerLog) -> None:
        if reporter is not None and update.stage == last_stage:
            reporter.updated(log)

    modules = [stage.module for stage in context.stages.values()]
    # A weight with two names is one tensor.
    tensors = (own_memory(each) for module in modules for each in module.state_dict().values())
    held = {each.data_ptr(): each.nbytes for each in tensors}
    peak = PeakMemory(place.compute, sum(held.values()))
    recorder = None
    if options.trace is not None:
        recorder = TraceRecorder(
            context.rank, options.trace_minibatches, place.compute, peak.now_bytes
        )
    # Who is told of updates has them read from the device, so only where somebody is.
    watch = watch_of(context)
    observers = Observers(
        context.heartbeat,
        None if reporter is None else on_update,
        recorder,
        None if watch is None else watch.sampler,
    )
    loop = Loop(context, groups, observers, ahead=True)
    if context.data.random:  # made at first use, random batches would count as training time
        context.heartbeat.enter("making random data")
        upcoming = _units(
            context, context.stream(first, min(first + RANDOM_BATCHES, context.minibatches))
        )
        for unit in islice(upcoming, MOST_RANDOM):
            context.data.batch(unit)
    context.connect()
    peak.forget()
    if place.kind == "cpu" and sys.platform == "linux":
        _let_messages_interrupt(threading.get_native_id())
    whole = chain.from_iterable(context.stream(*segment) for segment in context.segments(first))
    with context.data.reading(_units(context, whole)):
        context.heartbeat.enter("waiting for the others to start", meeting=True)
        dist.barrier(control_group())
        began_s = time.perf_counter()
        _train_segments(context, loop, kept, reporter)
        context.heartbeat.enter("waiting for the last worker", meeting=True)
        dist.barrier(control_group())
        seconds = time.perf_counter() - began_s
    if watch is not None:
        watch.finish()
    drift = () if watch is None else tuple(watch.found)
    result = gather_result(context, loop, peak, kept, seconds)
    late: list[LateFailure] = []
    saved_weights: str | None = None
    if context.job.save_weights is not None:
        with noting(late):
            save_weights(context, Path(context.job.save_weights))
            saved_weights = context.job.save_weights
    if checkpointer is not None:
        with noting(late):
            checkpointer.check_last()
    if copies is not None:
        copies.finish()
    if recorder is not None:
        context.heartbeat.enter("gathering the trace", meeting=True)
        lengths_of = context.lengths_of if context.lengths else None
        events = () if copies is None else copies.events
        timeline = gather_timeline(
            recorder,
            context.plan,
            context.minibatches,
            lengths_of,
            events,
            tuple(map(str, drift)),
        )
        if timeline is not None and on_timeline is not None:
            with noting(late):
                on_timeline(timeline)
    if result is None:
        return None
    return replace(result, saved_weights=saved_weights, drift=drift, late_failures=tuple(late))


def _trained_state(context: PipelineContext) -> TrainedState | None:
    """Return what on_update() may not change; None where this worker's one optimizer is that of the
    whole model.
    """
    if context.plan.workers == 1 and len(context.plan.stages) == 1:
        return None
    held = context.stages.values()
    optimizers = [each.optimizer.optimizer for each in held if each.optimizer.optimizer is not None]
    return TrainedState([each.module for each in held], optimizers)


def _train_segments(
    context: PipelineContext, loop: Loop, kept: Kept, reporter: Reporter | None
) -> None:
    """Train from the first minibatch that is not done to the end."""
    worker = loop.worker
    checkpointer, copies, first = kept
    every = context.job.options.evaluate_every
    for start, end in context.segments(first):
        loop.begin(start, end)
        at_end = end == context.minibatches
        for point in (
            ()
            if every is None
            else evaluation_points(context.shape, start, end, every, at_end=at_end)
        ):
            loop.run_to_evaluation(point)
            evaluation = loop.evaluate(point)
            if evaluation is not None and reporter is not None:
                reporter.evaluated(evaluation, worker.log)
        loop.drain()
        worker.settle()
        disk_every = context.job.checkpoints.every
        if (
            checkpointer is not None
            and disk_every is not None
            and (at_end or end % disk_every == 0)
        ):
            checkpointer.save(end, worker.log.losses, loop.evaluations)
        if copies is not None and not at_end and end % context.job.elastic.copy_every == 0:
            copies.save(end, worker.log.losses, loop.evaluations)
    context.heartbeat.enter("waiting for the last messages", meeting=True)
    worker.drain()


def restore(context: PipelineContext, recovery: Recovery | None = None) -> Kept:
    """Make what keeps the run's state, and go on from the newest one that is there."""
    job = context.job
    data = context.data
    checkpointer = None
    copies = None
    on_disk = job.checkpoints.every is not None or job.checkpoints.resume is not None
    if not on_disk and recovery is None:
        return Kept(None, None, 0)
    per_epoch = None if data.random else data.minibatches(None, 1)
    if on_disk:
        checkpointer = make_checkpointer(context, job.checkpoints, per_epoch)
    if recovery is not None:
        position = DataPosition(context.minibatch_size, per_epoch)
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
    shape = context.shape
    data = context.data
    place = context.place
    log = loop.worker.log
    stages = loop.worker.stages
    checkpointer, copies, first = kept
    per_minibatch = sum(len(shape.units_of(stage, context.rank, 0)) for stage in stages)
    per_round = 1 if shape.schedule.stashes else per_minibatch
    steady = steady_state(log.completions, *shape.unsteady(context.rank), per_round)
    own = WorkerReport(
        rank=context.rank,
        stage=min(stages),
        busy_share=steady.busy_share,
        # Backwards of all the worker's stages are counted, and each unit has one in every stage.
        samples_per_s=steady.units_per_s * context.microbatch_size / len(stages),
        predicted_memory_bytes=plan.tensor_bytes(min(stages)),
        **peak.fields(),
        weight_versions=max(replica.versions.most_versions for replica in stages.values()),
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


def _units(context: PipelineContext, instructions: Iterable[Instruction]) -> Iterator[Unit]:
    """Yield the units whose samples this worker reads, in the order of its forwards."""
    for each in instructions:
        if not isinstance(each, Forward) or not context.data.size(each.unit):
            continue
        # Where lengths vary, a worker reads all that passes it, once for all of its stages.
        if (
            each.stage == min(context.stages)
            if context.lengths
            else context.stages[each.stage].module.needs_batch
        ):
            yield each.unit


@cache  # once per thread, however many runs it trains
def _let_messages_interrupt(_thread: int) -> None:
    # Nicer than the threads of gloo, which move what a full socket has not taken at once. On a
    # shared core, Linux lets a woken thread wait until the running one has had its slice, unless
    # that one is nicer: a message then arrives milliseconds late. On Linux `nice` is of the calling
    # thread alone.
    os.nice(_NICER)
