"""The baseline: plain DistributedDataParallel on the unsplit model, with the same data, seeds and measurements."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from planner.errors import PlanError
from planner.executor.collect import encode_losses, gather_bytes, merge_losses
from planner.executor.data import make_batches
from planner.executor.heartbeat import Heart
from planner.executor.job import Job, TrainResult, WorkerReport
from planner.executor.measure import ProgressCallback, progress_reporter, steady_state
from planner.executor.memory import PeakMemory
from planner.executor.optimizer import make_optimizer
from planner.executor.setup import Place, check_world, join_group, local_place, message_timeout
from planner.executor.worker import Completion, WorkerLog
from planner.model.compiling import compiled
from planner.model.file import ModelFile, load_model_file
from planner.model.memory_format import lay_out
from planner.model.options import StageOptions, options_of
from planner.model.unsplit import unsplit_loss
from planner.schedule.instructions import Unit


def train_data_parallel(
    job: Job, on_progress: ProgressCallback | None = None, heart: Heart | None = None
) -> TrainResult | None:
    """Train the plan's model with DistributedDataParallel: worker k takes every minibatch k modulo the workers.

    Returns:
        The result on rank 0, None elsewhere.
    """
    check_world(job.plan)
    if job.plan.microbatch_size is None:
        raise PlanError("the plan does not know its minibatch size", hint="profile a model file: plan profile model.py")
    torch.set_num_threads(job.plan.device.threads or 1)
    heart = heart if heart is not None else Heart()
    heart.enter("joining the other workers", meeting=True)
    place = local_place()
    join_group(place, message_timeout(job.run_options.hang_timeout_s))
    try:
        return _train(job, load_model_file(job.model), place, heart, job.plan.microbatch_size, on_progress)
    finally:
        dist.destroy_process_group()


def _train(
    job: Job,
    model_file: ModelFile,
    place: Place,
    heart: Heart,
    batch_size: int,
    on_progress: ProgressCallback | None,
) -> TrainResult | None:
    device = place.compute
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(job.seed)
    options = options_of(job.plan)
    model = model_file.build_model().train().to(device)
    if options.channels_last:
        lay_out(model)
    data = make_batches(model_file, batch_size, 1, job.seed, drop_last=job.options.drop_last)
    # Whole rounds only: DistributedDataParallel hangs when a worker has a minibatch less.
    rounds = -(-data.minibatches(job.steps, job.epochs) // world)
    weights_bytes = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    peak = PeakMemory(device, already_bytes=weights_bytes)
    # Blocks may leave out weights by the values they see; of other models a step tells.
    unused = model_file.has_blocks or _leaves_out_weights(model_file, model, batch_size, options, device)
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    optimizer = make_optimizer(
        model_file,
        model,
        learning_rate_factor=world if job.options.scale_lr else 1,
        clip_grad_norm=job.options.clip_grad_norm,
        scale_loss=job.plan.autocast == "float16",
    )
    forward = compiled(ddp) if options.compiled else ddp
    log = WorkerLog()
    report = progress_reporter(on_progress, rounds * world, world, batch_size) if on_progress and rank == 0 else None
    dist.barrier()
    start = time.perf_counter()
    for round_ in range(rounds):
        minibatch = round_ * world + rank
        heart.enter(f"training minibatch {minibatch}")
        began = time.perf_counter()
        torch.manual_seed(job.seed * 1_000_003 + minibatch)
        batch = data.batch(Unit(minibatch)).to(device)
        loss = unsplit_loss(forward, model_file, batch, options)
        torch.autograd.backward(loss if optimizer.scaler is None else loss * optimizer.scaler.scale)
        optimizer.step(None)
        optimizer.advance(world)
        model.zero_grad(set_to_none=True)
        log.losses.append((minibatch, float(loss.detach())))
        log.busy_s += time.perf_counter() - began
        log.completions.append(Completion(time.perf_counter(), log.busy_s))
        if report is not None:
            report(log)
    heart.enter("waiting for the last worker", meeting=True)
    dist.barrier()
    seconds = time.perf_counter() - start
    steady = steady_state(log.completions, start_up=5, drain=0, per_round=1)
    mine = WorkerReport(
        rank=rank,
        stage=0,
        busy_share=steady.busy_share,
        samples_per_s=steady.units_per_s * batch_size,
        peak_memory_bytes=peak.bytes(),
        predicted_memory_bytes=0,
        weight_versions=1,
    )
    return _result(job, mine, log, seconds, rounds * world, batch_size, data.random, place.wire)


def _leaves_out_weights(
    model_file: ModelFile, model: nn.Module, batch_size: int, options: StageOptions, device: torch.device
) -> bool:
    """Whether some weight gets no gradient, for which DistributedDataParallel would wait for ever unless it is told."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng():
        batch = model_file.example_batch(batch_size).to(device)
        torch.autograd.backward(unsplit_loss(model, model_file, batch, options))
    unused = any(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return unused


def _result(
    job: Job,
    mine: WorkerReport,
    log: WorkerLog,
    seconds: float,
    minibatches: int,
    batch_size: int,
    random: bool,
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
        minibatch_size=batch_size,
        samples=minibatches * batch_size,
        seconds=seconds,
        samples_per_s=sum(worker.samples_per_s for worker in workers),
        predicted_samples_per_s=None,
        random_data=random,
        losses=merge_losses(losses),
        reports=workers,
    )
