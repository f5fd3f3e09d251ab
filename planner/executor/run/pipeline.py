"""Train a pipeline from a custom training loop: every worker runs the same script and hands each
minibatch in.

    with planner.pipeline(plan, "model.py") as pipeline:
        for batch in data:
            loss = pipeline.step(batch)

A step executes the schedule's instructions as far as the minibatches handed in allow. Under an
asynchronous schedule the newest minibatches stay in flight until more come, or until `drain`.

Ranks compare their calls and batches before anything comes of them: see
`planner.executor.run.calls`. Under a synchronous schedule a step does so first. Under an
asynchronous one that would empty the pipeline, so each update waits until the minibatches in it
have been compared, by when all ranks that they passed have announced them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from planner.errors import InputError
from planner.executor.checkpoint.checkpointer import Checkpointer
from planner.executor.communication.control import control_group, message_timeout, share
from planner.executor.run.agreement import (
    check_loss,
    check_schedule,
    joined,
    start_worker,
    take_place,
)
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.calls import Call, SharedCalls
from planner.executor.run.data import FedBatches, FedEvaluation
from planner.executor.run.drift_watch import DriftWatch, watch_of
from planner.executor.run.loop import Groups, Loop, make_checkpointer, save_weights
from planner.executor.run.worker import Observers
from planner.formats.drift import Drift
from planner.formats.plan import Plan
from planner.model.batch import Batch, make_batch
from planner.model.batch_digest import batch_digest
from planner.model.loss import check_labels, shares_function
from planner.model.randomness import generators_kept
from planner.model.spec import TrainingSpec
from planner.model.tensor.division import whole_state
from planner.options.option import keywords_of, part_of
from planner.options.training import (
    CheckpointOptions,
    DriftOptions,
    LoopOptions,
    RunOptions,
    StepOptions,
    TrainingOptions,
)
from planner.plan.rank_groups import sample_parts
from planner.workers.groups import GLOO
from planner.workers.job import Evaluation, Job
from planner.workers.meeting import started_as_worker
from planner.workers.supervisor import Supervisor
from planner.workers.watch import FOR_EVER


class SharedLosses:
    """Sums the parts of each minibatch's loss over all workers, so that all know it.

    Args:
        lag: steps until a step's sums are waited for, because the last stage is as many behind the
            first.
        width: the most minibatches whose losses may be incomplete.
        parts_of: how many parts the loss of a minibatch has, over all workers.
    """

    def __init__(
        self, group: dist.ProcessGroup, lag: int, width: int, parts_of: Callable[[int], int]
    ) -> None:
        self._group = group
        self._lag = lag
        self._width = width
        self._parts_of = parts_of
        self._pending: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._sums: dict[int, tuple[float, float]] = {}  # loss so far, and parts that are missing
        self.known: dict[int, float] = {}  # by minibatch

    def exchange(self, count: int, parts: Sequence[tuple[int, float]]) -> None:
        """Add this worker's new parts, of the last `width` of `count` minibatches; all workers call
        it together.
        """
        if count and count - 1 not in self.known:
            self._sums.setdefault(count - 1, (0.0, self._parts_of(count - 1)))
        sums = torch.zeros(self._width, 2, dtype=torch.float64)
        for minibatch, part in parts:
            sums[minibatch % self._width] += torch.tensor([part, 1.0], dtype=torch.float64)
        work = dist.all_reduce(sums, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((count, sums, work))
        while len(self._pending) > self._lag:
            self._merge()

    def settle(self) -> None:
        """Wait for all losses that are under way."""
        while self._pending:
            self._merge()

    @property
    def newest(self) -> float | None:
        if not self.known:
            return None
        return self.known[max(self.known)]

    def _merge(self) -> None:
        count, sums, work = self._pending.popleft()
        work.wait()
        for minibatch in range(max(0, count - self._width), count):
            loss, parts = sums[minibatch % self._width].tolist()
            if parts:
                total, missing = self._sums.pop(minibatch)
                if parts == missing:
                    self.known[minibatch] = total + loss
                else:
                    self._sums[minibatch] = total + loss, missing - parts


class Pipeline:
    """One worker's part of a pipeline that a custom loop feeds; made by `planner.pipeline`."""

    def __init__(self, job: Job, spec: TrainingSpec) -> None:
        plan = job.plan
        options = job.options
        check_schedule(plan)
        check_loss(plan, options)
        if not started_as_worker():
            raise InputError(
                "planner.pipeline runs in workers, and this process is none: the environment has "
                "no RANK and no "
                "WORLD_SIZE",
                hint=f"start the script with: torchrun --nproc-per-node {plan.workers} script.py",
            )

        self.plan = plan
        self._job = job
        self._spec = spec
        self._heartbeat = start_worker(job)
        self._depth = max(stage.in_flight * stage.replicas for stage in plan.stages)
        self._kept = 2 * self._depth + 2 * max(plan.replicas)
        self._data = FedBatches(
            sample_parts(plan) * plan.microbatches, self._kept, shares_function(plan.loss, spec)
        )
        self._group = ExitStack()
        self._evaluated: FedEvaluation | None = None
        self._watch: DriftWatch | None = None
        # One for all folders, because it has a process group.
        self._checkpoints: Checkpointer | None = None

    def __enter__(self) -> "Pipeline":
        """Join the other workers, unless the script has already done so, and build this worker's
        stages.
        """
        job = self._job
        heartbeat = self._heartbeat
        place = take_place(job, heartbeat)
        with ExitStack() as entering:  # an error in here leaves the others as one in the loop does
            supervisor = Supervisor(job, heartbeat, script=True)
            entering.enter_context(joined(job, heartbeat, supervisor))
            # Of its own, because a rank's script may take as long as it likes between its calls.
            limit = FOR_EVER
            if not supervisor.watches:
                limit = message_timeout(job.run_options.hang_timeout_s)
            calls_group = dist.new_group(backend=GLOO, timeout=limit)
            self._calls = SharedCalls(calls_group, heartbeat)
            self._context = pipeline_context(job, self._spec, place, heartbeat, self._data)
            self._context.await_models()
            groups = Groups.create(self._context)
            self._watch = watch_of(self._context)
            if self._watch is not None:
                entering.callback(self._watch.finish)
            sampler = None if self._watch is None else self._watch.sampler
            observers = Observers(self._context.heartbeat, sampler=sampler)
            if (evaluation := self._context.evaluation) is not None:
                fixed = evaluation.batch_size
                self._evaluated = FedEvaluation(
                    fixed or self._context.microbatch_size, fixed=fixed is not None
                )
            # Links cannot look ahead: nobody knows whether a minibatch will follow.
            self._loop = Loop(self._context, groups, observers, evaluation_data=self._evaluated)
            # Under an asynchronous schedule nobody waits for the newest losses: the device, too,
            # goes on meanwhile.
            lag = 0
            if self.plan.schedule.asynchronous:
                lag = self._depth
            self._unread = lag * self.plan.microbatches
            self._losses = SharedLosses(calls_group, lag, self._kept + lag, self._data.parts_of)
            self._context.connect()
            dist.barrier(control_group())
            heartbeat.leave_to_script()
            self._group = entering.pop_all()

        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drain the pipeline, unless something failed, and leave the other workers."""
        if error is not None and not isinstance(error, SystemExit):
            self._group.__exit__(kind, error, trace)
            return

        with self._group:  # which is told of a failure here as well
            self._calls.agree(Call.END, self._data.count)
            if error is not None:  # all scripts end here, and drop what is in flight
                raise error
            self._drain()
            self._loop.worker.drain()
            self._context.heartbeat.enter(
                "waiting for the other ranks to end the loop", meeting=True
            )
            dist.barrier(control_group())

    def step(self, batch: Any) -> float | None:
        """Train on one more minibatch, as far as the schedule allows.

        Args:
            batch: (args, target) or (args, kwargs, target), the same on every worker.

        Returns:
            The loss of the newest minibatch that all workers know, the same on each of them: of
            `batch` under a synchronous schedule, of an earlier one under an asynchronous schedule;
            None before the first.

        Raises:
            InputError: where ranks are given different minibatches, or some of them have ended
                their loops. No weights have seen such a minibatch then.
        """
        minibatch = make_batch(batch, "the batch given to step()")
        size = self._context.minibatch_size
        if minibatch.size > size:
            raise InputError(
                f"a minibatch of {minibatch.size} samples was given to step(), and the plan is "
                f"for {size}",
                hint="give as many samples as the plan says, or fewer in a last one",
            )

        check_labels(minibatch, self._context.loss, self._spec.origin)
        with self._called():
            self._calls.announce(
                Call.STEP, self._data.count, minibatch.size, self._digests([minibatch])
            )
            # Messages of another size than their receivers expect end a process.
            if not self.plan.schedule.asynchronous or minibatch.size != size:
                self._calls.compare()
            self._data.feed(minibatch)
            self._loop.run_allowed(
                self._data.count, self._unread, before_update=self._calls.compare
            )
            self._share_losses()

        return self._losses.newest

    def drain(self) -> float | None:
        """Finish all minibatches in flight, as at the end of a run; return the newest loss, as
        `step` does.
        """
        with self._called(Call.DRAIN):
            self._drain()
        return self._losses.newest

    def _drain(self) -> None:
        if self._data.count > self._loop.first:
            self._loop.drain(self._data.count)
            self._share_losses()
            self._losses.settle()
            self._loop.begin(self._data.count)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the newest weights of this worker's stages, by their names in the unsplit model;
        drain first.

        Replicas and ranks that divide their weights all call it, and get them whole.
        """
        with self._called():
            self._context.heartbeat.enter("gathering sharded weights", meeting=True)
            states = [whole_state(stage.module) for stage in self._context.stages.values()]
        return {name: tensor for state in states for name, tensor in state.items()}

    @property
    def losses(self) -> dict[int, float]:
        """The losses that all workers know, by minibatch; those of all minibatches after a
        drain.
        """
        return dict(self._losses.known)

    @property
    def minibatches(self) -> int:
        """Minibatches handed in, those before the checkpoint that was loaded included."""
        return self._data.count

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients of the newest update, before clipping.

        It is known where `clip_grad_norm` asks for it, under synchronous schedules; None elsewhere.
        """
        return self._loop.worker.gradient_norm

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of this worker's stages, for schedulers of the script's own; none without
        trained weights.
        """
        return [optimizer for optimizer, _ in self._rates()]

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the first group of parameters; None on a worker without trained
        weights.

        Setting it, on all workers alike, changes all groups from the next update of each stage on.
        Under asynchronous schedules stages are at different minibatches then; `drain` first if that
        matters.
        """
        return next(
            (float(each.param_groups[0]["lr"]) / factor for each, factor in self._rates()), None
        )

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        """Set the learning rate of all stages."""
        for optimizer, factor in self._rates():
            for group in optimizer.param_groups:
                group["lr"] = value * factor

    def _rates(self) -> list[tuple[Optimizer, float]]:
        """Return the optimizers, and by what each stage multiplies the learning rate."""
        held = [stage.optimizer for stage in self._context.stages.values()]
        return [
            (each.optimizer, each.learning_rate_factor)
            for each in held
            if each.optimizer is not None
        ]

    def drift(self) -> Drift | None:
        """Return where devices or links were last found otherwise than planned; None where they
        were not.

        Any worker may call it, at any time: nobody waits for another.
        """
        return None if self._watch is None else self._watch.newest

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Drain, and evaluate the newest weights; all workers call it with the same batches.

        Args:
            batches: as for `step`, each of as many samples as a microbatch at most.

        Raises:
            InputError: where the pipeline was made without `evaluates`, or ranks are given
                different batches.
        """
        if self._evaluated is None:
            raise InputError(
                "this pipeline was made without stages for evaluation",
                hint="make it with planner.pipeline(..., evaluates=True)",
            )

        self._evaluated.feed(batches)
        fed = self._evaluated.batches
        with self._called():
            self._calls.agree(
                Call.EVALUATE, self._data.count, sum(self._evaluated.sizes), self._digests(fed)
            )
            self._drain()
            found = self._loop.evaluate(self._data.count)
            self._context.heartbeat.enter("sharing the evaluation", meeting=True)
            texts = share("" if found is None else found.model_dump_json(), control_group())

        return Evaluation.model_validate_json(next(filter(None, texts)))

    def save_checkpoint(self, folder: str | Path, *, keep: int = 2) -> None:
        """Drain, and write a checkpoint of weights, optimizers and schedulers; all workers call it.

        It can be loaded under any other plan for the same model, also by `plan train` where the
        model file has no dataset().

        Args:
            folder: for the checkpoints of this run, which all hosts see. A run may write to several
                in turn. A checkpoint after as many minibatches as there is one of is replaced.
            keep: how many checkpoints to keep in it, the newest.

        Raises:
            PlannerError: when the folder has checkpoints of another run, or cannot be written.
        """
        with self._called(Call.SAVE_CHECKPOINT):
            self._drain()
            if self._checkpoints is None:
                self._checkpoints = make_checkpointer(self._context, CheckpointOptions())
            self._checkpoints.write_to(Path(folder), self._data.count, keep=keep)
            self._checkpoints.save(self._data.count)

        self._checkpoints.check_last()

    def load_checkpoint(self, path: str | Path) -> int:
        """Continue from a checkpoint, or the newest of a folder; all workers call it before the
        first step.

        Returns:
            The minibatches done before, which the script must not hand in again.

        Raises:
            InputError: when there is none, it does not fit the plan, or training has begun.
        """
        if self._data.count:
            raise InputError(
                f"a checkpoint cannot be loaded after {self._data.count} minibatches",
                hint="load it before the first step",
            )

        with self._called(Call.LOAD_CHECKPOINT):
            found = make_checkpointer(self._context, CheckpointOptions(resume=str(path)))
            first = found.restore()
            self._checkpoints = found
            self._data.count = first
            self._loop.begin(first)

        return first

    def save_weights(self, path: str | Path) -> None:
        """Drain, and write the whole model's weights to one file on the first worker; all workers
        call it.
        """
        with self._called(Call.SAVE_WEIGHTS):
            self._drain()
            save_weights(self._context, Path(path))
            dist.barrier(control_group())

    @contextmanager
    def _called(self, call: Call | None = None) -> Iterator[None]:
        """Carry out a call of the script, which all ranks must make where it is given here.

        Layers that draw random numbers seed the generators first, and ranks have different layers.
        What the script draws between calls stays the same on all of them.
        """
        with generators_kept():
            if call is not None:
                self._calls.agree(call, self._data.count)
            yield
        self._context.heartbeat.leave_to_script()

    def _digests(self, batches: Sequence[Batch]) -> list[int]:
        if self.plan.workers > 1:
            return [batch_digest(batch) for batch in batches]
        return []

    def _share_losses(self) -> None:
        self._context.heartbeat.enter("sharing the losses", meeting=True)
        seen = list(self._loop.worker.log.losses)
        self._loop.worker.log.losses.clear()
        self._losses.exchange(self._data.count, seen)


@keywords_of(LoopOptions)
def pipeline(plan: Plan, model: str | Path | TrainingSpec, options: LoopOptions) -> Pipeline:
    """Return a pipeline for a custom training loop, in a script that torchrun starts once per
    worker of the plan.

    Args:
        plan: from `solve` or `load_plan`.
        model: the model file that it was made for, or what `in_memory` returns.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the environment.
    """
    spec = model if isinstance(model, TrainingSpec) else TrainingSpec.from_file(model)
    steps = part_of(options, StepOptions)
    job = Job(
        model=spec.origin,
        plan=plan,
        seed=options.seed,
        device=options.device,
        backend=options.backend,
        options=TrainingOptions(**vars(steps), evaluate_every=1 if options.evaluates else None),
        run_options=RunOptions(hang_timeout_s=options.hang_timeout_s),
        drift=DriftOptions(drift_window=options.drift_window, profile=options.profile),
    )
    return Pipeline(job, spec)
