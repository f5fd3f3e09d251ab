"""The baseline: plain DistributedDataParallel on the unsplit model, with the same data, seeds and measurements.

Where the plan's schedule divides minibatches, so does the baseline: each worker adds up the gradients of its
microbatches, and they are reduced once per minibatch, as one who trains large minibatches with
DistributedDataParallel would do (Li et al. 2020, section 3.2.4), and as `plan solve` prices it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from planner.errors import PlanError
from planner.executor.communication.collect import encode_losses, gather_bytes, merge_losses
from planner.executor.health.heartbeat import Heartbeat
from planner.executor.job import Job, TrainResult, WorkerReport
from planner.executor.observe.measure import ProgressCallback, progress_reporter, steady_state
from planner.executor.observe.memory import PeakMemory
from planner.executor.run.data import RANDOM_BATCHES, BatchSource, make_batches
from planner.executor.run.optimizer import make_optimizer
from planner.executor.run.setup import Place, check_world, join_group, local_place, message_timeout
from planner.executor.run.worker import Completion, WorkerLog
from planner.model.memory_format import lay_out
from planner.model.options import ModuleOptions, module_options
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.compiling import compiled
from planner.model.stage.unsplit import unsplit_loss
from planner.schedule.instructions import Unit


@dataclass(frozen=True)
class Part:
    """What one worker computes with one forward and backward."""

    unit: Unit
    share: float  # of the minibatch's loss
    factor: float  # on the loss, so that the mean over the workers is the gradient to step with
    last: bool  # of this worker before the update: its backward reduces the gradients


@dataclass(frozen=True)
class Rounds:
    """Who computes what between two updates.

    A minibatch that the plan divides is divided over the workers: worker k takes microbatches k, k + `world`, ... With
    fewer of them than workers, minibatches are so much larger that everyone has one. What the plan does not divide
    goes whole to one worker, and as many are averaged as there are workers.

    Args:
        planned: microbatches of the plan's minibatch.
        world: workers.
    """

    planned: int
    world: int

    @property
    def divided(self) -> bool:
        """Whether workers share minibatches."""
        return self.planned > 1

    @property
    def per_update(self) -> int:
        """Microbatches between two updates, of all workers."""
        return max(self.planned, self.world)

    @property
    def per_minibatch(self) -> int:
        """Microbatches that a minibatch of the baseline has."""
        return self.per_update if self.divided else 1

    def count(self, data: BatchSource, steps: int | None, epochs: int | None) -> int:
        """Updates of a run of `steps` minibatches of the plan, or of `epochs`; whole rounds only.

        DistributedDataParallel hangs when a worker has a minibatch less.
        """
        own_steps = None if steps is None else -(-steps * self.planned // self.per_minibatch)
        minibatches = data.minibatches(own_steps, epochs)
        return minibatches if self.divided else -(-minibatches // self.world)

    def planned_minibatches(self, round_: int) -> int:
        """Of the plan's minibatches, those that are through with `round_` and not before it."""
        return (round_ + 1) * self.per_update // self.planned - round_ * self.per_update // self.planned

    def parts(self, data: BatchSource, round_: int, rank: int) -> Iterator[Part]:
        """What worker `rank` computes in `round_`; at least one, since all have to take part in the all-reduce."""
        if not self.divided:
            yield Part(Unit(round_ * self.world + rank), share=1.0, factor=1.0, last=True)
            return
        units = [Unit(round_, number) for number in range(rank, self.per_update, self.world)]
        sizes = {unit: data.size(unit) for unit in units if data.size(unit)}
        # Where a last, smaller minibatch left nothing: what worker 0 computes, too, and counts for nothing here.
        for number, (unit, size) in enumerate(sizes.items() or [(Unit(round_), 0)], start=1):
            share = size / data.minibatch_size(round_)
            yield Part(unit, share, share * self.world, last=number >= len(sizes))


def train_data_parallel(
    job: Job, on_progress: ProgressCallback | None = None, heartbeat: Heartbeat | None = None
) -> TrainResult | None:
    """Train the plan's model with DistributedDataParallel, with the plan's minibatches: see `Rounds`.

    Returns:
        The result on rank 0, None elsewhere.
    """
    check_world(job.plan)
    if job.plan.microbatch_size is None:
        raise PlanError("the plan does not know its minibatch size", hint="profile a model file: plan profile model.py")
    torch.set_num_threads(job.plan.device.threads or 1)
    heartbeat = heartbeat if heartbeat is not None else Heartbeat()
    heartbeat.enter("joining the other workers", meeting=True)
    place = local_place()
    join_group(place, message_timeout(job.run_options.hang_timeout_s))
    try:
        return _train(job, load_model_file(job.model), place, heartbeat, job.plan.microbatch_size, on_progress)
    finally:
        dist.destroy_process_group()


def _train(
    job: Job,
    spec: TrainingSpec,
    place: Place,
    heartbeat: Heartbeat,
    batch_size: int,
    on_progress: ProgressCallback | None,
) -> TrainResult | None:
    device = place.compute
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(job.seed)
    options = module_options(job.plan)
    model = spec.build_model().train().to(device)
    if options.channels_last:
        lay_out(model)
    work = Rounds(job.plan.microbatches, world)
    data = make_batches(spec, batch_size, work.per_minibatch, job.seed, drop_last=job.options.drop_last)
    rounds = work.count(data, job.steps, job.epochs)
    weights_bytes = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    peak = PeakMemory(device, already_bytes=weights_bytes)
    # Blocks may leave out weights by the values they see; of other models a step tells.
    unused = spec.defines("blocks") or _leaves_out_weights(spec, model, batch_size, options, device)
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    optimizer = make_optimizer(
        spec,
        model,
        learning_rate_factor=work.per_update / work.planned if job.options.scale_lr else 1,
        clip_grad_norm=job.options.clip_grad_norm,
        scale_loss=job.plan.autocast == "float16",
    )
    forward = compiled(ddp) if options.compiled else ddp
    log = WorkerLog()
    per_round, minibatch_size = (1 if work.divided else world), batch_size * work.per_minibatch
    report = None
    if on_progress and rank == 0:
        report = progress_reporter(on_progress, rounds * per_round, per_round, minibatch_size)
    if data.random:
        for round_ in range(min(rounds, RANDOM_BATCHES)):  # made later, they would slow down what is measured
            for part in work.parts(data, round_, rank):
                data.batch(part.unit)
    dist.barrier()
    start = time.perf_counter()
    for round_ in range(rounds):
        began = time.perf_counter()
        for part in work.parts(data, round_, rank):
            heartbeat.enter(f"training minibatch {part.unit.minibatch}")
            torch.manual_seed(job.seed * 1_000_003 + part.unit.minibatch * work.per_minibatch + part.unit.microbatch)
            batch = data.batch(part.unit).to(device)
            with nullcontext() if part.last else ddp.no_sync():
                loss = unsplit_loss(forward, spec, batch, options)
                scale = 1.0 if optimizer.scaler is None else optimizer.scaler.scale
                torch.autograd.backward(loss * (part.factor * scale))
            log.losses.append((part.unit.minibatch, float(loss.detach()) * part.share))
        optimizer.step(None)
        optimizer.advance(work.planned_minibatches(round_))
        model.zero_grad(set_to_none=True)
        log.busy_s += time.perf_counter() - began
        log.completions.append(Completion(time.perf_counter(), log.busy_s))
        if report is not None:
            report(log)
    heartbeat.enter("waiting for the last worker", meeting=True)
    dist.barrier()
    seconds = time.perf_counter() - start
    steady = steady_state(log.completions, start_up=5, drain=0, per_round=1)
    mine = WorkerReport(
        rank=rank,
        stage=0,
        busy_share=steady.busy_share,
        samples_per_s=steady.units_per_s * per_round * minibatch_size / world,
        peak_memory_bytes=peak.bytes(),
        predicted_memory_bytes=0,
        weight_versions=1,
    )
    return _result(mine, log, seconds, rounds * per_round, minibatch_size, data, place.wire)


def _leaves_out_weights(
    spec: TrainingSpec, model: nn.Module, batch_size: int, options: ModuleOptions, device: torch.device
) -> bool:
    """Whether some weight gets no gradient, for which DistributedDataParallel would wait for ever unless it is told."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng():
        batch = spec.example_batch(batch_size).to(device)
        torch.autograd.backward(unsplit_loss(model, spec, batch, options))
    unused = any(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return unused


def _result(
    mine: WorkerReport,
    log: WorkerLog,
    seconds: float,
    minibatches: int,
    minibatch_size: int,
    data: BatchSource,
    wire: torch.device,
) -> TrainResult | None:
    reports = gather_bytes(mine.model_dump_json().encode(), wire)
    losses = gather_bytes(encode_losses(log.losses), wire)
    if mine.rank != 0:
        return None
    workers = tuple(WorkerReport.model_validate_json(text) for text in reports)
    return TrainResult(
        config=str(len(workers)),
        schedule="data-parallel",
        workers=len(workers),
        minibatches=minibatches,
        minibatch_size=minibatch_size,
        samples=sum(map(data.minibatch_size, range(minibatches))),
        seconds=seconds,
        samples_per_s=sum(worker.samples_per_s for worker in workers),
        predicted_samples_per_s=None,
        random_data=data.random,
        losses=merge_losses(losses),
        reports=workers,
    )
