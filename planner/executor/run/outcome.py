"""Summarise a run: each worker's report, the result of all of them on rank 0, and why it was slower than predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from planner.executor.checkpoint.checkpointer import Checkpointer
from planner.executor.communication.control import gather_bytes, merge_losses
from planner.executor.observe.memory import PeakMemory
from planner.executor.observe.progress import WorkerLog, steady_state
from planner.executor.observe.run_log import Past
from planner.executor.run.context import Context, PipelineContext
from planner.executor.run.worker import PipelineWorker
from planner.formats.plan import Plan
from planner.workers.job import Evaluation, StartResult, TrainResult, WorkerReport

WORTH_SAYING = 0.15  # a run this much slower than predicted wants a reason
_SLOWER = 1.1  # computing this much slower than profiled is a reason


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
        **memory_fields(peak),
        weight_versions=max(replica.versions.most_versions for replica in stages.values()),
        deferred_weights=context.deferred,
    )


def memory_fields(peak: PeakMemory) -> dict[str, Any]:
    """Return what a worker reports of its memory."""
    gpu = peak.on_gpu()
    return {
        "peak_memory_bytes": peak.bytes(),
        "reserved_memory_bytes": None if gpu is None else gpu.reserved_bytes,
        "used_memory_bytes": None if gpu is None else gpu.used_bytes,
    }


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
    past, resumed, newest = Past(), None, None
    if checkpointer is not None:
        past, resumed, newest = checkpointer.past, checkpointer.resumed_from, checkpointer.newest
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
    slower = 0.0  # than profiled, the worst worker
    for report in reports:
        own = [stage for stage in plan.stages if report.rank in stage.ranks]
        compute_s = sum(plan.computing_s(stage) / len(stage.ranks) for stage in own)  # per minibatch, by the profile
        slower = max(slower, report.busy_share * measured_s / compute_s)
    if slower < _SLOWER:
        return (
            "workers computed as fast as profiled and waited longer for messages: the links are slower than the "
            "cluster says, or others use them; plan profile measures them with `links`"
        )
    computed = f"stages computed {slower - 1:.0%} slower than profiled"
    alone = plan.device.kind == "cpu" and (plan.device.processes or 1) == 1
    if alone and plan.workers > 1:
        return (
            f"{computed}: the profile is of one process alone, and workers that share a host's cores and memory slow "
            f"each other down; profile again with `processes={plan.workers}` if they share one"
        )
    return f"{computed}: something else uses the devices, or they run at another clock; profile again"
