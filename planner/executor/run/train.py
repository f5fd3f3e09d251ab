"""Train a plan in a worker process, from its start to its result.

Advise, at the beginning of an asynchronous run, against momentum that adds to the delay of late gradients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from torch.optim import Optimizer

from planner.executor.checkpoint.checkpointer import Checkpointer
from planner.executor.checkpoint.trained_weights import save_gathered
from planner.executor.observe.measure import ProgressCallback, WorkerLog, evaluated, progress_reporter
from planner.executor.observe.recording import TraceRecorder, Window, gather_timeline
from planner.executor.observe.watchers import all_of, hook, tensorboard
from planner.executor.run.agreement import check_schedule, take_place
from planner.executor.run.assemble import Groups, make_worker, restore
from planner.executor.run.context import PipelineContext, pipeline_context
from planner.executor.run.data import RANDOM_BATCHES
from planner.executor.run.evaluator import Evaluator, UnderWay, evaluation_points, until_updated
from planner.executor.run.lifecycle import joined, make_random_batches, peak_memory, start_worker, train_together
from planner.executor.run.outcome import Course, gather_result, report_of
from planner.executor.run.reading_ahead import reading_ahead
from planner.executor.run.worker import Observers, PipelineWorker
from planner.formats.timeline import Timeline
from planner.model.spec import TrainingSpec
from planner.model.tensor.division import whole_state
from planner.schedule.instructions import MOMENTUM_UPDATES, Forward, Instruction, Receive, Unit, Update
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Evaluation, Job, StartResult, TrainResult
from planner.workers.watch import Supervisor

_LARGE = 0.8


def late_momentum(late: int, optimizer: Optimizer) -> str | None:
    """Return advice on gradients that are `late` updates late; None for few, or for an optimizer of little momentum."""
    momentum = max(map(_momentum, optimizer.param_groups), default=0.0)
    if late < MOMENTUM_UPDATES or momentum < _LARGE:
        return None
    return (
        f"gradients of the first stage are {late} updates late, and {type(optimizer).__name__}'s momentum of "
        f"{momentum:g} makes them later: such runs have ended 10 to 25% above the loss of synchronous ones. "
        "planner.optim.NewestMuon is made for late gradients; with another optimizer, train without momentum, at a "
        "lower learning rate, or begin with a synchronous start (see 'Late gradients' in the docs)."
    )


def _momentum(group: dict[str, object]) -> float:
    """Return the share of older gradients in each update of a group: SGD's momentum, or Adam's first beta."""
    betas = group.get("betas")
    share = betas[0] if isinstance(betas, tuple) else group.get("momentum", 0.0)
    return share if isinstance(share, float) else 0.0


TimelineCallback = Callable[[Timeline], None]

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
    context = pipeline_context(job, TrainingSpec.from_file(job.model), place, heartbeat)
    with joined(context, supervisor or Supervisor(job, heartbeat)):
        return train(context, on_progress, on_timeline)


def train(
    context: PipelineContext, on_progress: ProgressCallback | None = None, on_timeline: TimelineCallback | None = None
) -> TrainResult | None:
    """Train in the joined group, and gather on rank 0 what all workers measured."""
    options, place = context.job.run_options, context.place
    # Every worker makes the same process groups, in this order: links, replicas, checkpoints, norm, evaluation.
    groups = Groups.create(context)
    checkpointer, first = restore(context)
    _advise(context)
    on_progress = _with_hooks(context, first, on_progress)
    peak = peak_memory(context, (stage.module for stage in context.stages.values()))
    window = Window.of(options.trace_minibatches)
    recorder = None
    if options.trace is not None:
        recorder = TraceRecorder(context.rank, window, place.compute, peak.now_bytes)
    observers = Observers(context.heartbeat, _update_callback(context, on_progress), recorder)
    worker = make_worker(context, groups, observers, lambda: _whole_stream(context, first))
    evaluator = None if context.evaluation is None else Evaluator(context, groups.replicas)
    run = _Run(context, worker, evaluator, checkpointer, on_progress)
    make_random_batches(context, _first_units(context, first))
    with reading_ahead(context.data, _units(context, chain.from_iterable(_whole_stream(context, first)))):
        seconds = train_together(context, lambda: run.train(first))
    report = report_of(context, worker, peak)
    result = gather_result(
        context, report, Course(worker.log, seconds, first, run.evaluations, checkpointer, run.start_result)
    )
    if context.job.save_weights is not None:
        save_weights(context, Path(context.job.save_weights))
    if checkpointer is not None:
        checkpointer.check_last()
    if recorder is not None:
        context.heartbeat.enter("gathering the trace", meeting=True)
        accumulate = context.shape.accumulate
        timeline = gather_timeline(recorder, context.plan, context.minibatches, accumulate)
        if timeline is not None and on_timeline is not None:
            on_timeline(timeline)
    return result


@dataclass
class _Run:
    """The segments of a run, with evaluations in them and checkpoints between them."""

    context: PipelineContext
    worker: PipelineWorker
    evaluator: Evaluator | None
    checkpointer: Checkpointer | None
    on_progress: ProgressCallback | None
    start_result: StartResult | None = None

    @property
    def evaluations(self) -> list[Evaluation]:
        """Those so far, on the worker that has their results."""
        return [] if self.evaluator is None else self.evaluator.done

    def train(self, first: int) -> None:
        """Train from minibatch `first` to the end."""
        began_s = time.perf_counter()
        for start, end in self.context.segments(first):
            self.worker.restart()
            self._train_segment(start, end)
            self.worker.settle()
            if self.context.start is not None and end == self.context.start.minibatches:
                seconds = time.perf_counter() - began_s - self.worker.log.paused_s
                samples = sum(map(self.context.data.minibatch_size, range(first, end)))
                self.start_result = self.context.start.result(self.context.job, samples, seconds)
                self.worker.log.completions.clear()  # the plan's speed is measured from here on
            if self.checkpointer is not None and self.context.job.checkpoints.every is not None:
                self.checkpointer.save(end, self.worker.log.losses, self.evaluations)
        self.context.heartbeat.enter("waiting for the last messages", meeting=True)
        self.worker.drain()

    def _train_segment(self, first: int, last: int) -> None:
        instructions, shape = self.context.stream(first, last), self.context.shape_at(first)
        if self.evaluator is not None:
            done = dict.fromkeys(self.context.stages, 0)
            under_way = UnderWay(shape, self.context.rank, first, last)
            for point in self._evaluation_points(first, last):
                rounds = {stage: -(-(point - first) // shape.minibatches_per_update(stage)) for stage in done}
                part = until_updated(instructions, {stage: rounds[stage] - done[stage] for stage in done})
                self.worker.run(self._then_expect(part, partial(under_way.at, point)))
                done = rounds
                self._evaluate(self.evaluator, point)
        self.worker.run(instructions)

    def _then_expect(
        self, instructions: Iterator[Instruction], under_way: Callable[[], list[Receive]]
    ) -> Iterator[Instruction]:
        """Yield `instructions`, then prepare for a pause: before the worker waits for its losses."""
        yield from instructions
        self.worker.expect(under_way)

    def _evaluation_points(self, first: int, last: int) -> list[int]:
        every = self.context.job.options.evaluate_every
        assert every is not None
        points = evaluation_points(self.context.shape_at(first), first, last, every)
        at_end = last == self.context.minibatches and last not in points
        return [*points, last] if at_end else points

    def _evaluate(self, evaluator: Evaluator, minibatch: int) -> None:
        log = self.worker.log
        began_s = time.perf_counter()
        evaluation = evaluator.run(minibatch)
        log.paused_s += time.perf_counter() - began_s
        if evaluation is not None and self.on_progress is not None:
            self.on_progress(evaluated(evaluation, log, self.context.minibatches))


def save_weights(context: PipelineContext, path: Path) -> None:
    """Gather the whole model's weights on rank 0 and write them; all workers call it."""
    mine = [stage.module for number, stage in context.stages.items() if context.is_first_replica(number)]
    state = {name: tensor for module in mine for name, tensor in whole_state(module).items()}
    context.heartbeat.enter("writing the weights", meeting=True)
    save_gathered(state if context.speaks else {}, path)


def _advise(context: PipelineContext) -> None:
    """Warn, on one worker of the stage whose gradients are latest, where the optimizer suits late ones badly."""
    stage = context.stages.get(0)
    if stage is None or stage.optimizer.optimizer is None or not context.is_first_replica(0) or not context.speaks:
        return
    if (advice := late_momentum(context.shape.late(0), stage.optimizer.optimizer)) is not None:
        _log.warning("%s", advice)


def _whole_stream(context: PipelineContext, first: int) -> Iterator[Iterator[Instruction]]:
    """Yield the instructions of all segments."""
    for start, end in context.segments(first):
        yield context.stream(start, end)


def _first_units(context: PipelineContext, first: int) -> Iterator[Unit]:
    """Yield the units of the first minibatches whose samples this worker reads."""
    return _units(context, context.stream(first, min(first + RANDOM_BATCHES, context.minibatches)))


def _units(context: PipelineContext, instructions: Iterable[Instruction]) -> Iterator[Unit]:
    """Yield the units whose samples this worker reads, in the order of its forwards."""
    for each in instructions:
        if isinstance(each, Forward) and context.stages[each.stage].module.needs_batch and context.data.size(each.unit):
            yield each.unit


def _with_hooks(context: PipelineContext, first: int, on_progress: ProgressCallback | None) -> ProgressCallback | None:
    """Add the user's hook and TensorBoard, on the worker that reports updates."""
    if not context.is_first_replica(len(context.plan.stages) - 1) or not context.speaks:
        return on_progress
    folder = context.job.options.tensorboard
    return all_of(on_progress, hook(context.spec), tensorboard(folder, first) if folder is not None else None)


def _update_callback(
    context: PipelineContext, on_progress: ProgressCallback | None
) -> Callable[[Update, WorkerLog], None] | None:
    """Report the updates of the last stage, on its first replica."""
    last = len(context.plan.stages) - 1
    if on_progress is None or not context.is_first_replica(last) or not context.speaks:
        return None
    per_update = context.shape.minibatches_per_update(last)
    report = progress_reporter(on_progress, context.minibatches, per_update, context.minibatch_size)
    return lambda update, log: report(log) if update.stage == last else None
