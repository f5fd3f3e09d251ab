"""Train a plan in a worker process, from its start to its result: a client of the loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from torch.optim import Optimizer

from planner.errors import InputError
from planner.executor.checkpoint.checkpointer import Checkpointer
from planner.executor.observe.progress import (
    ProgressCallback,
    WorkerLog,
    all_of,
    evaluated,
    hook,
    progress_reporter,
    tensorboard,
)
from planner.executor.observe.recording import TraceRecorder, gather_timeline
from planner.executor.run.agreement import check_schedule, take_place
from planner.executor.run.context import PipelineContext, pipeline_context
from planner.executor.run.data import RANDOM_BATCHES
from planner.executor.run.evaluator import evaluation_points
from planner.executor.run.lifecycle import (
    await_models,
    gather_result,
    joined,
    make_random_batches,
    peak_memory,
    report_of,
    start_worker,
    train_together,
)
from planner.executor.run.loop import Groups, Loop, make_checkpointer, save_weights
from planner.executor.run.reading_ahead import reading_ahead
from planner.executor.run.worker import Observers
from planner.formats.timeline import Timeline
from planner.model.spec import TrainingSpec
from planner.schedule.instructions import MOMENTUM_UPDATES, Forward, Instruction, Unit, Update
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job, StartResult, TrainResult
from planner.workers.supervisor import Supervisor

TimelineCallback = Callable[[Timeline], None]

_LARGE_MOMENTUM = 0.8
_log = logging.getLogger(__name__)


def train_worker(
    job: Job,
    on_progress: ProgressCallback | None = None,
    heartbeat: Heartbeat | None = None,
    on_timeline: TimelineCallback | None = None,
    supervisor: Supervisor | None = None,
) -> TrainResult | None:
    """Run this process's part of `job`; the environment is torchrun's.

    Args:
        on_progress: is told of every update, on the last stage.
        on_timeline: is given what all workers did, on rank 0, if the job asks for a trace.

    Returns:
        The result on rank 0, None elsewhere.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the other workers.
    """
    heartbeat = start_worker(job, heartbeat)
    check_schedule(job.plan)
    place = take_place(job, heartbeat)
    with joined(job, heartbeat, supervisor or Supervisor(job, heartbeat)):
        context = pipeline_context(job, TrainingSpec.from_file(job.model), place, heartbeat)
        return train(context, on_progress, on_timeline)


def train(
    context: PipelineContext, on_progress: ProgressCallback | None = None, on_timeline: TimelineCallback | None = None
) -> TrainResult | None:
    """Train in the joined group, and gather on rank 0 what all workers measured."""
    options, place = context.job.run_options, context.place
    await_models(context)
    # Every worker makes the same process groups, in this order: links, replicas, checkpoints, norm, evaluation.
    groups = Groups.create(context)
    checkpointer, first = restore(context)
    _advise(context)
    if context.reports_for(len(context.plan.stages) - 1):
        folder = context.job.options.tensorboard
        own = tensorboard(folder, first) if folder is not None else None
        on_progress = all_of(on_progress, hook(context.spec), own)
    peak = peak_memory(context, (stage.module for stage in context.stages.values()))
    recorder = None
    if options.trace is not None:
        recorder = TraceRecorder(context.rank, options.trace_minibatches, place.compute, peak.now_bytes)
    observers = Observers(context.heartbeat, _update_callback(context, on_progress), recorder)
    loop = Loop(context, groups, observers, _whole_stream(context, first))
    soon = context.stream(first, min(first + RANDOM_BATCHES, context.minibatches))
    make_random_batches(context, _units(context, soon))
    with reading_ahead(context.data, _units(context, chain.from_iterable(_whole_stream(context, first)))):
        seconds, start = train_together(
            context, lambda: _train_segments(context, loop, checkpointer, first, on_progress)
        )
    report = report_of(context, loop.worker, peak)
    result = gather_result(
        context,
        report,
        loop.worker.log,
        seconds,
        first=first,
        evaluations=loop.evaluations,
        checkpointer=checkpointer,
        start=start,
    )
    if context.job.save_weights is not None:
        save_weights(context, Path(context.job.save_weights))
    if checkpointer is not None:
        checkpointer.check_last()
    if recorder is not None:
        context.heartbeat.enter("gathering the trace", meeting=True)
        timeline = gather_timeline(recorder, context.plan, context.minibatches, context.shape.accumulate)
        if timeline is not None and on_timeline is not None:
            on_timeline(timeline)
    return result


def _train_segments(
    context: PipelineContext,
    loop: Loop,
    checkpointer: Checkpointer | None,
    first: int,
    on_progress: ProgressCallback | None,
) -> StartResult | None:
    """Train from minibatch `first` to the end, with evaluations in the segments and checkpoints between them.

    Returns:
        What was measured of the synchronous start, if there is one.
    """
    began_s = time.perf_counter()
    worker = loop.worker
    result = None
    for start, end in context.segments(first):
        loop.begin(start, end)
        for point in _evaluation_points(context, start, end):
            loop.run_to_evaluation(point)
            evaluation = loop.evaluate(point)
            if evaluation is not None and on_progress is not None:
                on_progress(evaluated(evaluation, worker.log, context.minibatches))
        loop.drain()
        worker.settle()
        if context.start is not None and end == context.start.minibatches:
            seconds = time.perf_counter() - began_s - worker.log.paused_s
            result = StartResult(
                minibatches=end,
                schedule=context.start.shape.schedule.name,
                microbatches=context.start.shape.microbatches,
                samples_per_s=sum(map(context.data.minibatch_size, range(first, end))) / seconds,
                predicted_samples_per_s=context.job.predicted_start_samples_per_s,
            )
            worker.log.completions.clear()  # the plan's speed is measured from here on
        if checkpointer is not None and context.job.checkpoints.every is not None:
            checkpointer.save(end, worker.log.losses, loop.evaluations)
    context.heartbeat.enter("waiting for the last messages", meeting=True)
    worker.drain()
    return result


def _evaluation_points(context: PipelineContext, first: int, last: int) -> list[int]:
    every = context.job.options.evaluate_every
    if every is None:
        return []
    points = evaluation_points(context.shape_at(first), first, last, every)
    at_end = last == context.minibatches and last not in points
    return [*points, last] if at_end else points


def restore(context: PipelineContext) -> tuple[Checkpointer | None, int]:
    """Resume from the job's checkpoint, if there is one.

    Returns:
        The checkpointer, None for a job without checkpoints; and the number of minibatches done before.

    Raises:
        InputError: when the checkpoint does not fit the run.
    """
    job, data = context.job, context.data
    if job.checkpoints.every is None and job.checkpoints.resume is None:
        return None, 0
    checkpointer = make_checkpointer(context, job.checkpoints, None if data.random else data.minibatches(None, 1))
    first = checkpointer.restore()
    if first > context.minibatches:
        raise InputError(
            f"the checkpoint '{checkpointer.resumed_from}' is of a run of {first} minibatches, and the whole run is "
            f"to have {context.minibatches}",
            hint="`steps` and `epochs` count from the beginning of the first run",
        )
    return checkpointer, first


def _advise(context: PipelineContext) -> None:
    """Warn, on one worker of the stage whose gradients are latest, where the optimizer suits late ones badly."""
    stage = context.stages.get(0)
    optimizer = None if stage is None else stage.optimizer.optimizer
    if optimizer is not None and context.reports_for(0) and (advice := late_momentum(context.shape.late(0), optimizer)):
        _log.warning("%s", advice)


def late_momentum(late: int, optimizer: Optimizer) -> str | None:
    """Return advice on gradients that are `late` updates late; None for few, or for an optimizer of little momentum."""
    momentum = 0.0  # the share of older gradients in each update: SGD's momentum, or Adam's first beta
    for group in optimizer.param_groups:
        share = group["betas"][0] if isinstance(group.get("betas"), tuple) else group.get("momentum", 0.0)
        momentum = max(momentum, share if isinstance(share, float) else 0.0)
    if late < MOMENTUM_UPDATES or momentum < _LARGE_MOMENTUM:
        return None
    return (
        f"gradients of the first stage are {late} updates late, and {type(optimizer).__name__}'s momentum of "
        f"{momentum:g} makes them later: such runs have ended 10 to 25% above the loss of synchronous ones. "
        "planner.optim.NewestMuon is made for late gradients; with another optimizer, train without momentum, at a "
        "lower learning rate, or begin with a synchronous start (see 'Late gradients' in the docs)."
    )


def _whole_stream(context: PipelineContext, first: int) -> Iterator[Iterator[Instruction]]:
    """Yield the instructions of all segments."""
    for start, end in context.segments(first):
        yield context.stream(start, end)


def _units(context: PipelineContext, instructions: Iterable[Instruction]) -> Iterator[Unit]:
    """Yield the units whose samples this worker reads, in the order of its forwards."""
    for each in instructions:
        if isinstance(each, Forward) and context.stages[each.stage].module.needs_batch and context.data.size(each.unit):
            yield each.unit


def _update_callback(
    context: PipelineContext, on_progress: ProgressCallback | None
) -> Callable[[Update, WorkerLog], None] | None:
    """Report the updates of the last stage, on its first replica."""
    last = len(context.plan.stages) - 1
    if on_progress is None or not context.reports_for(last):
        return None
    per_update = context.shape.minibatches_per_update(last)
    report = progress_reporter(on_progress, context.minibatches, per_update, context.minibatch_size)
    return lambda update, log: report(log) if update.stage == last else None
