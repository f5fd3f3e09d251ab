"""The part of a run that one plan trains: all of it, unless the run moves to another plan."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from planner.executor.checkpoint.checkpointer import Checkpointer, Keeper
from planner.executor.checkpoint.copies import Copies
from planner.executor.observe.memory import PeakMemory
from planner.executor.observe.progress import ProgressCallback, Reporter, WorkerLog, hook
from planner.executor.observe.recording import TraceRecorder
from planner.executor.observe.untouched import TrainedState
from planner.executor.run.context import PipelineContext
from planner.executor.run.data import MOST_RANDOM, RANDOM_BATCHES
from planner.executor.run.drift_watch import watch_of
from planner.executor.run.evaluator import evaluation_points
from planner.executor.run.left_out import IdleDevice
from planner.executor.run.loop import Groups, Loop
from planner.executor.run.replan import Replanner
from planner.executor.run.worker import Observers
from planner.formats.drift import Drift
from planner.model.tensor.division import own_memory
from planner.schedule.instructions import Forward, Instruction, Unit, Update
from planner.workers.job import Evaluation

_LEFT_OUT = "waiting, left out of the plan because its device is slow"


class Kept(NamedTuple):
    """What keeps the run's state, and how many of its minibatches were done before."""

    checkpointer: Checkpointer | None
    copies: Copies | None
    first: int

    @property
    def keepers(self) -> list[Keeper]:
        """What there is of both."""
        return [each for each in (self.checkpointer, self.copies) if each is not None]


class PlanPart:
    """One worker's part of the training under one plan; all workers make theirs together."""

    def __init__(
        self,
        context: PipelineContext,
        groups: Groups,
        on_progress: ProgressCallback | None,
        replanner: Replanner | None,
    ) -> None:
        self.context = context
        self._reporter = _reporter(context, on_progress)
        self._replanner = replanner
        self._idle: IdleDevice | None = None

        modules = [stage.module for stage in context.stages.values()]
        # A weight with two names is one tensor.
        tensors = (own_memory(each) for module in modules for each in module.state_dict().values())
        held = {each.data_ptr(): each.nbytes for each in tensors}
        self.peak = PeakMemory(context.place.compute, sum(held.values()))
        self.recorder: TraceRecorder | None = None
        options = context.job.run_options
        if options.trace is not None:
            self.recorder = TraceRecorder(
                context.rank,
                options.trace_minibatches,
                context.place.compute,
                self.peak.now_bytes,
            )

        self._watch = watch_of(context, replanner)
        self._drift_before: tuple[Drift, ...] = ()
        # Who is told of updates has them read from the device, so only where somebody is.
        observers = Observers(
            context.heartbeat,
            None if self._reporter is None else self._on_update,
            self.recorder,
            None if self._watch is None else self._watch.sampler,
        )
        self.loop = Loop(context, groups, observers, ahead=True)

    @property
    def drift(self) -> tuple[Drift, ...]:
        """What worker 0 found of devices and links, under the plans before, too."""
        own = () if self._watch is None else tuple(self._watch.found)
        return (*self._drift_before, *own)

    def prepare(self, first: int) -> None:
        """Make random data, and connect to the other workers, before minibatch `first`."""
        context = self.context
        if not context.stages:
            context.heartbeat.enter("measuring its device")
            self._idle = IdleDevice(context)

        if context.data.random:  # made at first use, random batches would count as training time
            context.heartbeat.enter("making random data")
            upcoming = _units(
                context, context.stream(first, min(first + RANDOM_BATCHES, context.minibatches))
            )
            for unit in islice(upcoming, MOST_RANDOM):
                context.data.batch(unit)

        context.connect()
        self.peak.forget()

    def go_on_from(
        self,
        losses: Sequence[tuple[int, float]],
        evaluations: Sequence[Evaluation],
        drift: Sequence[Drift],
    ) -> None:
        """Take over this worker's losses and evaluations so far, and what was found."""
        self.loop.worker.log.losses += losses
        self.loop.evaluations += evaluations
        self._drift_before = tuple(drift)

    def train(self, kept: Kept, first: int) -> int:
        """Train from minibatch `first` to the end, or to where the run moves to another plan;
        return the minibatches done. The pipeline is empty then.
        """
        context = self.context
        whole = chain.from_iterable(context.stream(*segment) for segment in context.segments(first))
        with context.data.reading(_units(context, whole)):
            done = first
            for start, end in context.segments(first):
                done = self._train_segment(kept, start, end)
                if done < end or self._ends_between(end):
                    break
            context.heartbeat.enter("waiting for the last messages", meeting=True)
            self.loop.worker.drain()

        return done

    def finish(self) -> None:
        """End the watch over the run."""
        if self._watch is not None:
            self._watch.finish()

    def _train_segment(self, kept: Kept, start: int, end: int) -> int:
        """Train a part after which the pipeline runs empty; return the minibatches done."""
        context = self.context
        loop = self.loop
        log = loop.worker.log
        done = self._run(start, end) if context.stages else self._wait(start, end)
        if done < end:
            return done

        at_end = end == context.minibatches
        disk_every = context.job.checkpoints.checkpoint_every
        if (
            kept.checkpointer is not None
            and disk_every is not None
            and (at_end or end % disk_every == 0)
        ):
            kept.checkpointer.save(end, log.losses, loop.evaluations)

        if kept.copies is not None and not at_end and end % context.job.elastic.copy_every == 0:
            kept.copies.save(end, log.losses, loop.evaluations)
        return end

    def _run(self, start: int, end: int) -> int:
        """Run this worker's instructions of a segment; return the minibatches done."""
        loop = self.loop
        loop.begin(start, end, None if self._replanner is None else self._replanner.ends_at)
        every = self.context.job.options.evaluate_every
        if every is not None:
            self._evaluate_along(start, end, every)
        loop.drain()
        loop.worker.settle()
        if self._replanner is not None:
            self._replanner.tell_done(loop.last)
        return loop.last

    def _wait(self, start: int, end: int) -> int:
        """Wait until the others have done a segment, which has nothing for this worker; return the
        minibatches done.
        """
        assert self._replanner is not None
        waits = partial(self.context.heartbeat.enter, _LEFT_OUT, meeting=True)
        waits()
        for point in self._replanner.points(start, end):
            if self._replanner.await_ending(point):
                return point
            self._measure_at(point)
            waits()

        self._replanner.await_done(end)
        return end

    def _ends_between(self, end: int) -> bool:
        """Return whether the plan ends between two segments."""
        if self._replanner is None or end == self.context.minibatches:
            return False
        if self._replanner.ends_at(end):
            return True
        if self._idle is not None:
            self._measure_at(end)
        return False

    def _measure_at(self, minibatch: int) -> None:
        """Measure this worker's device once in half a window, at the last point where its plan may
        end; not where the others are past the next one, which may be the end.
        """
        assert self._idle is not None
        assert self._replanner is not None
        if self._watch is None:
            return
        after = minibatch + self._replanner.every
        number = self._watch.window_at(minibatch)
        if number == self._watch.window_at(after):
            return
        is_late = self._replanner.is_settled(after)
        self._watch.tell_left_out(number, None if is_late else self._idle.ratio())

    def _evaluate_along(self, start: int, end: int, every: int) -> None:
        context = self.context
        loop = self.loop
        at_end = end == context.minibatches
        for point in evaluation_points(context.shape, start, end, every, at_end=at_end):
            loop.run_to_evaluation(point)
            if loop.last < point:
                return
            evaluation = loop.evaluate(point)
            if evaluation is not None and self._reporter is not None:
                self._reporter.evaluated(evaluation, loop.worker.log)

    def _on_update(self, update: Update, log: WorkerLog) -> None:
        last_stage = len(self.context.plan.stages) - 1
        if self._reporter is not None and update.stage == last_stage:
            self._reporter.updated(log)


def _reporter(context: PipelineContext, on_progress: ProgressCallback | None) -> Reporter | None:
    """Return what tells of progress, on the one worker that does."""
    last_stage = len(context.plan.stages) - 1
    if not context.is_first_replica(last_stage) or not context.leads_tensor_group:
        return None
    user_hook = hook(context.spec, _trained_state(context))
    callbacks = [each for each in (on_progress, user_hook) if each is not None]
    if not callbacks:
        return None
    per_update = context.shape.minibatches_per_update(last_stage)
    return Reporter(callbacks, context.minibatches, per_update, context.minibatch_size)


def _trained_state(context: PipelineContext) -> TrainedState | None:
    """Return what on_update() may not change; None where this worker's one optimizer is that of the
    whole model.
    """
    if context.plan.workers == 1 and len(context.plan.stages) == 1:
        return None
    held = context.stages.values()
    optimizers = [each.optimizer.optimizer for each in held if each.optimizer.optimizer is not None]
    return TrainedState([each.module for each in held], optimizers)


def _units(context: PipelineContext, instructions: Iterable[Instruction]) -> Iterator[Unit]:
    """Yield the units whose samples this worker reads, in the order of its forwards."""
    for each in instructions:
        if not isinstance(each, Forward) or not context.data.size(each.unit):
            continue
        # Where lengths vary, a worker reads all that passes it, once for all of its stages.
        if (
            each.stage == min(context.stages)
            if context.lengths
            else context.reads_batches(context.stages[each.stage].module)
        ):
            yield each.unit
