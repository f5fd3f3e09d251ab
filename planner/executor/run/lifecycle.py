"""What frames every worker's training, with a pipeline or without: start, join, train together, leave, and report."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import PlanError
from planner.executor.checkpoint.checkpointer import Checkpointer
from planner.executor.communication.control import (
    control_group,
    gather_bytes,
    join_group,
    merge_losses,
    message_timeout,
)
from planner.executor.observe.memory import PeakMemory
from planner.executor.observe.progress import WorkerLog, steady_state
from planner.executor.observe.run_log import Past
from planner.executor.run.context import Context, PipelineContext
from planner.executor.run.worker import PipelineWorker
from planner.formats.plan import Plan
from planner.schedule.instructions import Unit
from planner.workers.ending import abort_groups, keep_failures_ours
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Evaluation, Job, StartResult, TrainResult, WorkerReport
from planner.workers.meeting import await_all
from planner.workers.place import set_gpu_variables
from planner.workers.supervisor import Supervisor

T = TypeVar("T")
WORTH_SAYING = 0.15  # a run this much slower than predicted wants a reason
_MOST_OF_IT = 0.5  # of the time lost: what explains less is not the cause
_SLOWER = 1.1  # computing this much slower than profiled is a reason
_NICER = 5  # the thread that computes than those that move messages


def report_of(context: PipelineContext, worker: PipelineWorker, peak: PeakMemory) -> WorkerReport:
    """Summarise what this worker measured of its stages."""
    shape, stages = context.shape, worker.stages
    depth, first = shape.in_flight(0), min(stages)
    steady = steady_state(
        worker.log.completions,
        start_up=2 * depth * len(stages),
        drain=depth * len(stages) if shape.asynchronous else 0,
        per_round=shape.units_per_update(context.rank),
    )
    return WorkerReport(
        rank=context.rank,
        stage=first,
        busy_share=steady.busy_share,
        # Backwards of all the worker's stages are counted, and each unit has one in every stage.
        samples_per_s=steady.units_per_s * context.microbatch_size / len(stages),
        predicted_memory_bytes=context.plan.tensor_bytes(first),
        **peak.fields(),
        weight_versions=max(replica.versions.most_versions for replica in stages.values()),
        deferred_weights=context.deferred,
    )


def gather_result(
    context: Context,
    report: WorkerReport,
    log: WorkerLog,
    seconds: float,
    *,
    first: int = 0,
    evaluations: Sequence[Evaluation] = (),
    checkpointer: Checkpointer | None = None,
    start: StartResult | None = None,
) -> TrainResult | None:
    """Gather what all workers report on rank 0, which returns the result; None elsewhere. All workers call it.

    Args:
        seconds: of the whole run.
        first: minibatch that the run began at.
        evaluations: those whose results this worker has.
    """
    reports = [WorkerReport.model_validate_json(text) for text in gather_bytes(report.model_dump_json().encode())]
    losses = merge_losses(gather_bytes(json.dumps(log.losses).encode()))
    lines = "\n".join(evaluation.model_dump_json() for evaluation in evaluations)
    evaluated = [line for part in gather_bytes(lines.encode()) for line in part.splitlines()]
    if context.rank != 0:
        return None
    job, plan, data, place = context.job, context.plan, context.data, context.place
    past = Past() if checkpointer is None else checkpointer.past
    resumed = None if checkpointer is None else checkpointer.resumed_from
    newest = None if checkpointer is None else checkpointer.newest
    # Every sample passes the last stage once.
    samples_per_s = sum(reports[rank].samples_per_s for rank in plan.stages[-1].ranks)
    predicted = job.predicted_samples_per_s or plan.predicted.samples_per_s
    return TrainResult(
        config=plan.config,
        device=place.kind,
        device_name=place.device_name,
        backend=place.backend,
        schedule=plan.schedule.name,
        workers=len(reports),
        minibatches=context.minibatches - first,
        first_minibatch=first,
        minibatch_size=context.minibatch_size,
        samples=sum(data.minibatch_size(minibatch) for minibatch in range(first, context.minibatches)),
        seconds=seconds,
        samples_per_s=samples_per_s,
        predicted_samples_per_s=predicted,
        synchronous_start=start,
        likely_cause=None
        if job.baseline is not None or not predicted
        else likely_cause(job.plan, reports, predicted, samples_per_s),
        random_data=data.random,
        losses=(*past.losses, *losses),
        evaluations=(*past.evaluations, *map(Evaluation.model_validate_json, evaluated)),
        reports=tuple(reports),
        saved_weights=job.save_weights,
        resumed_from=None if resumed is None else str(resumed),
        checkpoint=None if newest is None else str(newest),
        checkpoint_s=0.0 if checkpointer is None else checkpointer.seconds,
    )


def likely_cause(
    plan: Plan, reports: Sequence[WorkerReport], predicted_samples_per_s: float, measured_samples_per_s: float
) -> str | None:
    """Return the likeliest cause; None where the run was about as fast as predicted."""
    if not measured_samples_per_s or predicted_samples_per_s < measured_samples_per_s * (1 + WORTH_SAYING):
        return None
    assert plan.minibatch_size is not None
    measured_s = plan.minibatch_size / measured_samples_per_s
    lost_s = measured_s - plan.minibatch_size / predicted_samples_per_s
    slower = longer_s = 0.0  # than profiled, the worst worker
    for report in reports:
        own = [stage for stage in plan.stages if report.rank in stage.ranks]
        compute_s = sum(plan.computing_s(stage) / len(stage.ranks) for stage in own)  # per minibatch, by the profile
        slower = max(slower, report.busy_share * measured_s / compute_s)
        longer_s = max(longer_s, report.busy_share * measured_s - compute_s)
    if slower < _SLOWER or longer_s < _MOST_OF_IT * lost_s:
        return (
            "workers waited longer for messages, which explains more than what they computed: the links are slower "
            "than the cluster says, or others use them; plan profile measures them with `links`"
        )
    computed = f"stages computed {slower - 1:.0%} slower than profiled"
    alone = plan.device.kind == "cpu" and (plan.device.processes or 1) == 1
    if alone and plan.workers > 1:
        return (
            f"{computed}: the profile is of one process alone, and workers that share a host's cores and memory slow "
            f"each other down; profile again with `processes={plan.workers}` if they share one"
        )
    return f"{computed}: something else uses the devices, or they run at another clock; profile again"


def start_worker(job: Job, heartbeat: Heartbeat | None = None) -> Heartbeat:
    """Check and set up this process; return its heartbeat.

    Raises:
        PlanError: when the plan needs another number of workers.
    """
    world, needed = int(os.environ["WORLD_SIZE"]), job.plan.workers
    if world != needed:
        raise PlanError(
            f"plan '{job.plan.config}' needs {needed} workers, but {world} were started",
            hint=f"start {needed}: --nnodes times --nproc-per-node of torchrun, or the tasks of srun",
        )
    torch.set_num_threads(job.plan.device.threads or 1)
    keep_failures_ours()
    set_gpu_variables()
    heartbeat = heartbeat or Heartbeat()
    heartbeat.enter("starting")
    return heartbeat


@contextmanager
def joined(job: Job, heartbeat: Heartbeat, supervisor: Supervisor) -> Iterator[None]:
    """Join the other workers, unless that was done before, and leave them at the end.

    Models are built within: however long that takes on another host, no worker waits with a time-out, and one that is
    gone is missed at once. At an error the supervisor leaves the reason before anything that may block; then what was
    joined here is aborted.
    """
    heartbeat.enter("joining the other workers", meeting=True)
    joins = not dist.is_initialized()
    if joins:
        join_group(message_timeout(job.run_options.hang_timeout_s))
    try:
        supervisor.enter()
        heartbeat.enter("building its model")
        yield
        supervisor.leave()
    except BaseException as error:
        if isinstance(error, Exception):
            supervisor.fail(error)
        if joins:
            abort_groups()
        raise
    if joins:
        dist.destroy_process_group()


def peak_memory(context: Context, modules: Iterable[nn.Module]) -> PeakMemory:
    """Measure from now on how much memory training needs, beside the weights and buffers of `modules`."""
    tensors = (tensor for module in modules for tensor in module.state_dict().values())
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return PeakMemory(context.place.compute, already_bytes=state_bytes)


def make_random_batches(context: Context, units: Iterable[Unit]) -> None:
    """Make the random batches of `units` before the start: made at first use, they would count as training time."""
    if context.data.random:
        context.heartbeat.enter("making random data")
        for unit in units:
            context.data.batch(unit)


def await_models(context: Context) -> None:
    """Wait until all workers have built their models, before the first operation that has a time-out."""
    context.heartbeat.enter("waiting for the others to build their models", meeting=True)
    await_all("models")


def connect_all(context: Context) -> None:
    """Use every process group for data once, and take memory; all workers call it, with nothing under way."""
    context.heartbeat.enter("waiting for the others to be ready", meeting=True)
    await_all("ready")  # one may have read a large checkpoint
    context.heartbeat.enter("connecting to the other workers", meeting=True)
    context.groups.use_once()
    context.heartbeat.enter("taking memory", meeting=True)
    context.prepare()


def train_together(context: Context, train: Callable[[], T]) -> tuple[float, T]:
    """Call `train` on all workers at the same time; return the seconds until the last is done, and its result."""
    connect_all(context)
    if context.place.kind == "cpu" and sys.platform == "linux":
        _let_messages_interrupt(threading.get_native_id())
    context.heartbeat.enter("waiting for the others to start", meeting=True)
    dist.barrier(control_group())
    start = time.perf_counter()
    result = train()
    context.heartbeat.enter("waiting for the last worker", meeting=True)
    dist.barrier(control_group())
    return time.perf_counter() - start, result


@cache  # once per thread, however many runs it trains
def _let_messages_interrupt(_thread: int) -> None:
    """Make this thread nicer than those of gloo.

    They move what a full socket has not taken at once. On a core that they share with the computation, Linux lets a
    woken thread wait until the running one has had its slice, unless that one is nicer: a message then arrives
    milliseconds late, and a synchronous pipeline waits for it. On Linux `nice` is of the calling thread alone.
    """
    os.nice(_NICER)
