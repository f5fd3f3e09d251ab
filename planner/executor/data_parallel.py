"""Train the baseline: DistributedDataParallel on the unsplit model, with the same data, seeds and measurements.

If the plan's schedule divides minibatches, so does the baseline: each worker accumulates the gradients of its
microbatches, and they are all-reduced once per minibatch. That is how one trains large minibatches with
DistributedDataParallel (Li et al. 2020, section 3.2.4), and how `plan solve` prices it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from planner.errors import PlanError
from planner.executor.checkpoint.pretrained import fill_pretrained
from planner.executor.communication.control import message_timeout
from planner.executor.observe.progress import ProgressCallback, progress_reporter, steady_state
from planner.executor.run.agreement import take_place
from planner.executor.run.context import Context
from planner.executor.run.data import RANDOM_BATCHES, BatchSource, make_batches, weighted
from planner.executor.run.lifecycle import (
    await_models,
    connect_all,
    gather_result,
    joined,
    make_random_batches,
    peak_memory,
    start_worker,
    train_together,
)
from planner.executor.run.reading_ahead import ReadAhead, reading_ahead
from planner.executor.run.worker import Observers, Worker
from planner.executor.stage.optimizer import StageOptimizer
from planner.model.loss import unsplit_loss
from planner.model.options import lay_out, module_options
from planner.model.spec import TrainingSpec
from planner.model.stage.code import compiled
from planner.runtime import runtime_of
from planner.schedule.instructions import Backward, Forward, Instruction, Unit, Update
from planner.workers.groups import DataGroups
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job, TrainResult, WorkerReport
from planner.workers.supervisor import Supervisor


@dataclass(frozen=True)
class Part:
    """What one worker computes with one forward and backward."""

    unit: Unit
    share: float  # of the minibatch's loss
    factor: float  # multiplies the loss, so that the workers' mean gradient is the one to step with
    last: bool  # whether it is this worker's last one before the update, whose backward all-reduces the gradients


@dataclass(frozen=True)
class Rounds:
    """How microbatches are divided over the workers; a round is what they compute between two updates.

    If the plan divides minibatches, worker k takes microbatches k, k + `world`, ... of each; with fewer microbatches
    than workers, the baseline's minibatch is larger than the plan's, one microbatch for each worker. If it does not,
    each worker takes a whole minibatch, and an update averages over all workers'.

    Args:
        planned: microbatches in the plan's minibatch.
    """

    planned: int
    world: int

    @property
    def per_update(self) -> int:
        """Microbatches in a round, of all workers."""
        return max(self.planned, self.world)

    @property
    def per_minibatch(self) -> int:
        """Microbatches in the baseline's minibatch."""
        return self.per_update if self.planned > 1 else 1

    @property
    def minibatches(self) -> int:
        """The baseline's minibatches in a round."""
        return self.per_update // self.per_minibatch

    def count(self, data: BatchSource, steps: int | None, epochs: int | None) -> int:
        """Return the number of rounds in a run of `steps` of the plan's minibatches, or of `epochs`.

        All rounds are whole: DistributedDataParallel hangs when a worker has fewer backwards than the others.
        """
        own_steps = None if steps is None else -(-steps * self.planned // self.per_minibatch)
        return -(-data.minibatches(own_steps, epochs) // self.minibatches)

    def planned_minibatches(self, round_: int) -> int:
        """Return how many of the plan's minibatches end in `round_`."""
        return (round_ + 1) * self.per_update // self.planned - round_ * self.per_update // self.planned

    def parts(self, data: BatchSource, round_: int, rank: int) -> Iterator[Part]:
        """Yield what worker `rank` computes in `round_`: at least one part, because all must join the all-reduce."""
        if self.planned == 1:
            yield Part(Unit(round_ * self.world + rank), share=1.0, factor=1.0, last=True)
            return
        units = [Unit(round_, number) for number in range(rank, self.per_update, self.world)]
        # A last, smaller minibatch may have nothing for this worker. It computes the first microbatch, with factor 0.
        shares = {unit: data.share(unit) for unit in units if data.size(unit)} or {Unit(round_): 0.0}
        for number, (unit, share) in enumerate(shares.items(), start=1):
            yield Part(unit, share, share * self.world, last=number == len(shares))


def train_data_parallel(
    job: Job,
    on_progress: ProgressCallback | None = None,
    heartbeat: Heartbeat | None = None,
    supervisor: Supervisor | None = None,
) -> TrainResult | None:
    """Train the plan's model with DistributedDataParallel, with the plan's minibatches: see `Rounds`.

    Args:
        on_progress: is told of every update, on rank 0.

    Returns:
        The result on rank 0, None elsewhere.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the other workers.
    """
    heartbeat = start_worker(job, heartbeat)
    plan, place = job.plan, take_place(job, heartbeat)
    if plan.microbatch_size is None:
        raise PlanError("the plan does not know its minibatch size", hint="profile a model file: plan profile model.py")
    rounds = Rounds(plan.microbatches, plan.workers)
    with joined(job, heartbeat, supervisor or Supervisor(job, heartbeat)):
        spec = TrainingSpec.from_file(job.model)
        torch.manual_seed(job.seed)
        model = spec.build_model().train()
        fill_pretrained(spec, model, job.seed)
        model = model.to(place.compute)
        if module_options(plan).channels_last:
            lay_out(model)
        made = make_batches(spec, plan.microbatch_size, rounds.per_minibatch, job.seed, drop_last=job.options.drop_last)
        data = ReadAhead(weighted(made, plan.loss, spec), place.compute)
        context = Context(
            job=job,
            spec=spec,
            place=place,
            rank=int(os.environ["RANK"]),
            heartbeat=heartbeat,
            data=data,
            minibatches=rounds.count(data, job.steps, job.epochs) * rounds.minibatches,
            groups=DataGroups(place, message_timeout(job.run_options.hang_timeout_s)),
        )
        await_models(context)
        return _train(context, rounds, model, on_progress)


def _train(
    context: Context, rounds: Rounds, model: nn.Module, on_progress: ProgressCallback | None
) -> TrainResult | None:
    """Train in the joined group."""
    peak = peak_memory(context, [model])
    report = None
    if on_progress is not None and context.rank == 0:
        report = progress_reporter(on_progress, context.minibatches, rounds.minibatches, context.minibatch_size)
    observers = Observers(context.heartbeat, None if report is None else lambda _, log: report(log))
    worker = DataParallelWorker(context, rounds, model, observers)
    count = context.minibatches // rounds.minibatches
    first = (part.unit for round_ in range(min(count, RANDOM_BATCHES)) for part in worker.parts(round_))
    make_random_batches(context, first)
    units = (part.unit for round_ in range(count) for part in worker.parts(round_))
    with reading_ahead(context.data, units):
        seconds, _ = train_together(context, lambda: worker.run(worker.stream(count)))
    worker.settle()
    per_round = sum(1 for _ in worker.parts(0))
    steady = steady_state(worker.log.completions, start_up=5 * per_round, drain=0, per_round=per_round)
    mine = WorkerReport(
        rank=context.rank,
        stage=0,
        busy_share=steady.busy_share,
        samples_per_s=steady.units_per_s * context.microbatch_size,
        predicted_memory_bytes=0,
        weight_versions=1,
        **peak.fields(),
    )
    result = gather_result(context, mine, worker.log, seconds)
    if result is None:
        return None
    return result.model_copy(
        update={
            "config": str(context.plan.workers),
            "schedule": "data-parallel",
            "samples_per_s": sum(report.samples_per_s for report in result.reports),
            "predicted_samples_per_s": None,
        }
    )


class DataParallelWorker(Worker):
    """Executes the baseline's instructions: forward, backward and update of one stage, which is the whole model.

    Args:
        model: on the device where this worker computes.
    """

    def __init__(self, context: Context, rounds: Rounds, model: nn.Module, observers: Observers) -> None:
        super().__init__(observers, context.place.compute, stop_on_nan=context.job.run_options.stop_on_nan)
        self._context, self._rounds, self._options = context, rounds, module_options(context.plan)
        # Blocks may skip weights depending on the values that they see; for other models one step shows it.
        unused = context.spec.defines("blocks") or self._leaves_out_weights(model)
        group = context.groups.for_collectives(None)
        connect_all(context)
        self._model = DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)
        self._forward = compiled(self._model) if self._options.compiled else self._model
        self._optimizer = StageOptimizer(
            context.spec,
            model,
            learning_rate_factor=rounds.per_update / rounds.planned if context.job.options.scale_lr else 1,
            clip_grad_norm=context.job.options.clip_grad_norm,
            scale_loss=context.job.scales_loss,
        )
        self._parts: dict[Unit, Part] = {}  # of the round in progress
        self._losses: dict[Unit, Tensor] = {}  # between forward and backward

    def parts(self, round_: int) -> Iterator[Part]:
        """Yield what this worker computes in `round_`."""
        return self._rounds.parts(self._context.data, round_, self._context.rank)

    def stream(self, rounds: int) -> Iterator[Instruction]:
        """Yield the instructions of so many rounds, for `run`."""
        for round_ in range(rounds):
            self._parts = {part.unit: part for part in self.parts(round_)}
            for unit, part in self._parts.items():
                yield Forward(0, unit)
                yield Backward(0, unit, last_of_round=part.last)
            yield Update(0, round_)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Forward(unit=unit):
                self._losses[unit] = self._loss(unit)
            case Backward(unit=unit):
                part, loss, scaler = self._parts[unit], self._losses.pop(unit), self._optimizer.scaler
                torch.autograd.backward(loss * (part.factor * (1.0 if scaler is None else scaler.scale)))
                counts = loss.detach().double() if part.share else torch.zeros((), dtype=torch.double)
                self._log_loss(unit, counts * part.share)
            case Update(round=round_):
                self._optimizer.step(None)
                self._optimizer.advance(self._rounds.planned_minibatches(round_))
                self._model.zero_grad(set_to_none=True)
                self._note_update(instruction)
            case _:
                raise AssertionError(instruction)

    def _loss(self, unit: Unit) -> Tensor:
        number = unit.minibatch * self._rounds.per_minibatch + unit.microbatch
        torch.manual_seed(self._context.job.seed * 1_000_003 + number)
        batch = self._context.data.batch(unit).to(self._context.place.compute)
        # As no_sync() does. It holds for the backward of this forward: forward arms the all-reduce, or does not.
        self._model.require_backward_grad_sync = self._parts[unit].last
        return unsplit_loss(self._forward, self._context.spec, batch, self._options)

    def _leaves_out_weights(self, model: nn.Module) -> bool:
        """Return whether some weight gets no gradient: DistributedDataParallel hangs unless it is told."""
        before = [buffer.clone() for buffer in model.buffers()]
        with runtime_of(self._context.place.compute).random_state_kept(self._context.place.compute):
            batch = self._context.spec.example_batch(self._context.microbatch_size).to(self._context.place.compute)
            torch.autograd.backward(unsplit_loss(model, self._context.spec, batch, self._options))
        unused = any(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
        return unused
