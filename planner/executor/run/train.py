"""A worker process from start to end: build its stages, join the group, run the stream, report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import InputError, PlanError
from planner.executor.checkpoint.checkpointer import Checkpointer, DataPosition
from planner.executor.checkpoint.write_parts import Restorable
from planner.executor.communication.collect import gather_state, save_state
from planner.executor.communication.gradients import GradientAverager
from planner.executor.communication.layouts import Layouts
from planner.executor.communication.links import LinkGroups, Links, SendLimits
from planner.executor.communication.shared import SharedGradients, shared_parameters
from planner.executor.health.heartbeat import Heartbeat
from planner.executor.job import Job, TrainResult
from planner.executor.observe.measure import ProgressCallback, evaluated, progress_reporter
from planner.executor.observe.memory import PeakMemory
from planner.executor.observe.recording import TraceRecorder, Window, gather_timeline
from planner.executor.observe.watchers import all_of, hook, tensorboard
from planner.executor.outcome import gather, report_of
from planner.executor.run.data import RANDOM_BATCHES, BatchSource, EvaluationBatches, make_batches
from planner.executor.run.evaluator import Evaluator, ReplicatedBuffers, evaluation_points, until_updated
from planner.executor.run.joint import JointNorm
from planner.executor.run.minibatch_statistics import MinibatchStatistics
from planner.executor.run.optimizer import make_optimizer
from planner.executor.run.replica import StageReplica
from planner.executor.run.setup import (
    Place,
    check_same_job,
    check_schedule,
    check_world,
    join_group,
    local_place,
    message_timeout,
)
from planner.executor.run.stages import build_modules, check_shared, check_sizes, transferred
from planner.executor.run.worker import Worker, WorkerLog
from planner.formats.plan_shape import shape_of
from planner.formats.timeline import Timeline
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.compiling import check_compiler
from planner.model.stage.evaluation import separate_buffers, share_buffers
from planner.model.stage.warmup import warm_up
from planner.schedule.instructions import (
    Instruction,
    Unit,
    Update,
)
from planner.schedule.parts.segments import segment_stream, segments


def train_worker(
    job: Job,
    on_progress: ProgressCallback | None = None,
    heartbeat: Heartbeat | None = None,
    on_timeline: Callable[[Timeline], None] | None = None,
) -> TrainResult | None:
    """Run this process's part of `job`; the environment is torchrun's.

    Args:
        job: the same for all workers.
        on_progress: told of every update, on the last stage.
        heartbeat: of this process.
        on_timeline: given what all workers did, on rank 0, where the job asks for a trace.

    Returns:
        The result on rank 0, None elsewhere.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the other workers.
    """
    check_world(job.plan)
    check_schedule(job.plan)
    torch.set_num_threads(job.plan.device.threads or 1)
    place = local_place()
    heartbeat = heartbeat if heartbeat is not None else Heartbeat()
    heartbeat.enter("building its model")
    run = TrainingRun(job, load_model_file(job.model), place, heartbeat)
    heartbeat.enter("joining the other workers", meeting=True)
    join_group(place, message_timeout(job.run_options.hang_timeout_s))
    try:
        check_same_job(job, place.wire)
        return run.run(on_progress, on_timeline)
    finally:
        dist.destroy_process_group()


class TrainingRun:
    """One worker's part of a job: its stages with everything they need to run.

    Args:
        job: the same for all workers.
        spec: of `job.model`.
        place: where this worker computes.
        heartbeat: where it tells what it does.
        data: in place of the model file's dataset.
    """

    def __init__(
        self,
        job: Job,
        spec: TrainingSpec,
        place: Place,
        heartbeat: Heartbeat | None = None,
        data: BatchSource | None = None,
    ) -> None:
        self.job = job
        self.heartbeat = heartbeat if heartbeat is not None else Heartbeat()
        self.plan = job.plan
        self.place = place
        self.rank = int(os.environ["RANK"])
        self.stages = [index for index, stage in enumerate(self.plan.stages) if self.rank in stage.ranks]
        self.spec = spec
        built = build_modules(
            self.plan,
            self.stages,
            spec,
            job.seed,
            defer_weights=job.defer_weights,
            evaluate=job.options.evaluate_every is not None,
            # A minibatch that is not divided is its own microbatch.
            defer_batch_norm=job.options.deferred_batch_norm and self.plan.microbatches > 1,
        )
        check_shared(self.plan, built.shared, spec, job.options)
        self.evaluation = built.evaluation
        self.transfers = transferred(self.plan, built.training)
        self.modules = {stage: module.to(place.compute) for stage, module in built.training.items()}
        assert self.plan.microbatch_size is not None  # or building the modules had failed
        self.microbatch_size = self.plan.microbatch_size
        self.data = data or make_batches(
            spec, self.microbatch_size, self.plan.microbatches, job.seed, drop_last=job.options.drop_last
        )
        check_sizes(self.modules.values(), self.data.last_sizes)
        if self.plan.compiled:
            self._compile(spec)
        self.minibatches = self.data.minibatches(job.steps, job.epochs)
        self.shape = replace(shape_of(self.plan), accumulate=job.options.accumulate, shared=tuple(sorted(built.shared)))
        self.scale_loss = self.plan.autocast == "float16"
        if self.scale_loss and self.shape.asynchronous and built.shared:
            raise PlanError(
                "under asynchronous schedules each stage scales float16 losses by itself, but stages share a weight",
                hint="make a plan for bfloat16, or for a schedule that drains: plan solve --schedule zb-h1",
            )
        self.shared = {
            stage: SharedGradients(stage, shared_parameters(stage, module, built.shared))
            for stage, module in self.modules.items()
        }
        self.optimizers = {
            stage: make_optimizer(
                spec,
                module,
                learning_rate_factor=self.shape.minibatches_per_update(stage) if job.options.scale_lr else 1,
                clip_grad_norm=job.options.clip_grad_norm,
                scale_loss=self.scale_loss,
            )
            for stage, module in self.modules.items()
        }
        self.first = 0  # minibatches done in earlier runs
        self.layouts = Layouts(self.transfers, self.shared, self.data.size, with_scale=self.scale_loss)

    def _compile(self, spec: TrainingSpec) -> None:
        """Now, because a worker that compiled in the middle of a run would look as if it stood still."""
        self.heartbeat.enter("compiling its stages")
        check_compiler(self.place.compute.type)
        with torch.random.fork_rng():
            for size in {self.microbatch_size, *filter(None, self.data.last_sizes)}:
                batch = spec.example_batch(size).to(self.place.compute)
                for module in self.modules.values():
                    warm_up(module, batch)

    def run(
        self, on_progress: ProgressCallback | None, on_timeline: Callable[[Timeline], None] | None = None
    ) -> TrainResult | None:
        """Train, and gather what all workers measured on rank 0."""
        groups = LinkGroups.create(self.shape, self._new_group, tags=self.place.backend == "gloo")
        replicas = self._replica_groups()
        checkpointer = self._restore()
        if self.rank == self.plan.stages[-1].ranks[0]:
            folder = self.job.options.tensorboard
            written = tensorboard(folder, self.first) if folder is not None else None
            on_progress = all_of(on_progress, hook(self.spec), written)
        states = (tensor for module in self.modules.values() for tensor in module.state_dict().values())
        weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in states)
        peak = PeakMemory(self.place.compute, already_bytes=weights_bytes)
        links = self._links(groups, self._instructions)
        stages = {stage: self._replica(stage, replicas.get(stage)) for stage in self.stages}
        options = self.job.run_options
        window = Window.of(options.trace_minibatches)
        recorder = TraceRecorder(self.rank, window, self.place.compute) if options.trace is not None else None
        worker = Worker(
            stages,
            links,
            on_update=self._progress(on_progress),
            heartbeat=self.heartbeat,
            recorder=recorder,
            stop_on_nan=options.stop_on_nan,
            joint_norm=self._joint_norm(),
        )
        evaluator = self._evaluator(replicas)
        self._make_random_batches()
        self.heartbeat.enter("waiting for the others to start", meeting=True)
        dist.barrier()
        start = time.perf_counter()
        for first, last in self._segments():
            for replica in stages.values():
                replica.versions.restart()
            self._train(worker, evaluator, on_progress, first, last)
            if self.job.checkpoints.every is not None and checkpointer is not None:
                checkpointer.save(last, worker.log.losses, [] if evaluator is None else evaluator.done)
        self.heartbeat.enter("waiting for the last messages", meeting=True)
        links.drain()
        dist.barrier()
        done = [] if evaluator is None else evaluator.done
        seconds = time.perf_counter() - start
        report = report_of(self.plan, self.shape, self.rank, worker, stages, peak.bytes())
        gathered = gather(report, worker.log, done, self.place.wire)
        if self.job.save_weights is not None:
            self.save_weights(Path(self.job.save_weights))
        if checkpointer is not None:
            checkpointer.check_last()
        result = None if gathered is None else gathered.result(self.job, self.data, self.first, seconds, checkpointer)
        if recorder is not None:
            self.heartbeat.enter("gathering the trace", meeting=True)
            timeline = gather_timeline(recorder, self.plan, self.minibatches, self.place.wire, self.shape.accumulate)
            if timeline is not None and on_timeline is not None:
                on_timeline(timeline)
        return result

    def prepare(self) -> tuple[Worker, dict[int, StageReplica], Links]:
        """For who runs the instructions himself: the worker, its stages and its messages; in a joined group."""
        groups = LinkGroups.create(self.shape, self._new_group, tags=self.place.backend == "gloo")
        replicas = self._replica_groups()
        links = self._links(groups, lambda: ())
        stages = {stage: self._replica(stage, replicas.get(stage)) for stage in self.stages}
        return Worker(stages, links, heartbeat=self.heartbeat, joint_norm=self._joint_norm()), stages, links

    def _links(self, groups: LinkGroups, instructions: Callable[[], Iterable[Instruction]]) -> Links:
        limits = SendLimits(
            max(self.shape.in_flight(stage) for stage in range(len(self.plan.stages))), rounds=self.shape.lag
        )
        return Links(groups, instructions, self.layouts.of, limits, self.place)

    def _make_random_batches(self) -> None:
        """Before the start: made when they are first used, they slow the first minibatches down, which are measured."""
        needing = [stage for stage, module in self.modules.items() if module.needs_batch]
        if not self.data.random or not needing:
            return
        self.heartbeat.enter("making random data")
        for minibatch in range(self.first, min(self.first + RANDOM_BATCHES, self.minibatches)):
            for unit in (Unit(minibatch, microbatch) for microbatch in range(self.plan.microbatches)):
                if any(self.shape.rank_of(stage, unit) == self.rank for stage in needing):
                    self.data.batch(unit)

    def _train(
        self, worker: Worker, evaluator: Evaluator | None, on_progress: ProgressCallback | None, first: int, last: int
    ) -> None:
        """One segment, stopping where there is to be evaluated."""
        instructions = segment_stream(self.shape, self.stages[0], self.rank, first, last)
        if evaluator is not None:
            every, done = self.job.options.evaluate_every, dict.fromkeys(self.stages, 0)
            assert every is not None
            points = evaluation_points(self.shape, first, last, every)
            if last == self.minibatches and last not in points:
                points.append(last)
            for point in points:
                rounds = {s: -(-(point - first) // self.shape.minibatches_per_update(s)) for s in self.stages}
                worker.run(until_updated(instructions, {s: rounds[s] - done[s] for s in self.stages}))
                done = rounds
                self._evaluate(worker, evaluator, on_progress, point)
        worker.run(instructions)

    def _evaluate(
        self, worker: Worker, evaluator: Evaluator, on_progress: ProgressCallback | None, minibatch: int
    ) -> None:
        began_s = time.perf_counter()
        evaluation = evaluator.run(minibatch)
        worker.log.paused_s += time.perf_counter() - began_s
        if evaluation is not None and on_progress is not None:
            on_progress(evaluated(evaluation, worker.log, self.minibatches))

    def _evaluator(self, replicas: Mapping[int, dist.ProcessGroup]) -> Evaluator | None:
        if self.evaluation is None:
            return None
        buffers = []
        for stage, module in self.evaluation.modules.items():
            module.to(self.place.compute)
            first = self.plan.stages[stage].ranks[0]
            if self.rank == first:
                share_buffers(module, self.modules[stage])
            else:
                separate_buffers(module)
            if stage in replicas:
                buffers.append(ReplicatedBuffers(module, first, replicas[stage]))
        fixed = self.evaluation.graph.batch_size
        return Evaluator(
            self.evaluation,
            self.spec,
            EvaluationBatches(
                self.spec.evaluation_dataset(), fixed or self.microbatch_size, drop_last=fixed is not None
            ),
            self.shape,
            self.rank,
            self.place,
            self._new_group,
            self.heartbeat,
            buffers,
        )

    def _restore(self) -> Checkpointer | None:
        """Go on from the job's checkpoint, if it has one; None for a job without checkpoints."""
        if self.job.checkpoints.every is None and self.job.checkpoints.resume is None:
            return None
        own = [
            Restorable(
                stage,
                self.plan.stages[stage].ranks.index(self.rank),
                module,
                self.optimizers[stage].optimizer,
                self.optimizers[stage].learning_rate_factor,
                self.optimizers[stage].extras,
            )
            for stage, module in self.modules.items()
        ]
        per_epoch = None if self.data.random else self.data.minibatches(None, 1)
        size = self.microbatch_size * self.plan.microbatches
        checkpointer = Checkpointer(self.job, own, DataPosition(size, per_epoch), self.heartbeat)
        self.first = checkpointer.restore()
        if self.first > self.minibatches:
            raise InputError(
                f"the checkpoint '{checkpointer.resumed_from}' is of a run of {self.first} minibatches, and the whole "
                f"run is to have {self.minibatches}",
                hint="--steps and --epochs count from the beginning of the first run",
            )
        return checkpointer

    def _replica_groups(self) -> dict[int, dist.ProcessGroup]:
        """The group of each replicated stage's workers: all workers make all groups, in the same order."""
        # Every replica starts from the same weights because all build the model from the same seed.
        return {
            index: self._new_group(stage.ranks) for index, stage in enumerate(self.plan.stages) if stage.replicas > 1
        }

    def _new_group(self, ranks: Iterable[int] | None) -> dist.ProcessGroup:
        timeout = message_timeout(self.job.run_options.hang_timeout_s)
        group: dist.ProcessGroup = dist.new_group(None if ranks is None else list(ranks), timeout=timeout)
        return group

    def _joint_norm(self) -> JointNorm | None:
        """For clipping, and to leave out an update everywhere; under asynchronous schedules each stage is alone."""
        if (self.job.options.clip_grad_norm is None and not self.scale_loss) or self.shape.asynchronous:
            return None
        return JointNorm(self._new_group(None), self.place.wire)

    def _replica(self, stage: int, replicas: dist.ProcessGroup | None) -> StageReplica:
        module = self.modules[stage]
        return StageReplica(
            stage,
            module,
            self.transfers,
            self.optimizers[stage],
            GradientAverager(list(module.parameters()), replicas) if replicas is not None else None,
            self.data,
            device=self.place.compute,
            seed=self.job.seed,
            recompute=self.plan.stages[stage].recompute,
            counts_in_norm=self.rank == self.plan.stages[stage].ranks[0],
            shared=self.shared[stage],
            statistics=MinibatchStatistics(module, replicas),
        )

    def _segments(self) -> Iterator[tuple[int, int]]:
        """Where the pipeline is drained: before each checkpoint."""
        return segments(self.first, self.minibatches, self.job.checkpoints.every)

    def _instructions(self) -> Iterable[Instruction]:
        """The whole run's: what is received early in a segment may be posted in the one before it."""
        for first, last in self._segments():
            yield from segment_stream(self.shape, self.stages[0], self.rank, first, last)

    def save_weights(self, path: Path) -> None:
        """Gather the whole model's weights on rank 0 and write them; all workers call it."""
        mine = [module for stage, module in self.modules.items() if self.rank == self.plan.stages[stage].ranks[0]]
        state = gather_state(
            {n: tensor for module in mine for n, tensor in module.state_dict().items()}, self.place.wire
        )
        if self.rank == 0:
            self.heartbeat.enter("writing the weights")
            save_state(state, path)

    def _progress(self, on_progress: ProgressCallback | None) -> Callable[[Update, WorkerLog], None] | None:
        number, last = len(self.plan.stages) - 1, self.plan.stages[-1]
        if on_progress is None or self.rank != last.ranks[0]:
            return None
        per_update = self.shape.minibatches_per_update(number)
        report = progress_reporter(
            on_progress, self.minibatches, per_update, self.microbatch_size * self.plan.microbatches
        )
        return lambda update, log: report(log) if update.stage == number else None
