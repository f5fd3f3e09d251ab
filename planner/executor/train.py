"""A worker process from start to end: build the stage, join the group, run the stream, report."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import PlanError
from planner.executor.collect import encode_losses, gather_bytes, gather_state, merge_losses, save_state
from planner.executor.data import make_batches
from planner.executor.gradients import GradientAverager
from planner.executor.job import Job, TrainResult, WorkerReport
from planner.executor.links import Links
from planner.executor.measure import ProgressCallback, progress_reporter, steady_state
from planner.executor.memory import PeakMemory
from planner.executor.messages import Layout, layout_of
from planner.executor.worker import Worker, WorkerLog
from planner.model.autocast import autocast_dtype
from planner.model.deferred import build_deferred, materialize
from planner.model.file import ModelFile, load_model_file
from planner.model.graph import ValueSpec
from planner.model.load import capture_file
from planner.model.stage import StageModule, build_stage
from planner.plan_file import Plan, Transfer
from planner.schedule.check import ScheduleError, check_streams
from planner.schedule.instructions import (
    Instruction,
    Receive,
    ReceiveActivation,
    ReceiveGradient,
    Send,
    SendActivation,
    Unit,
)
from planner.schedule.streams import Channel, PipelineShape, stream
from planner.sharing import shared_weight

TIMEOUT = timedelta(minutes=10)  # for one message; a dead peer is noticed at once


def local_device() -> torch.device:
    """This worker's device: the GPU of its local rank where every local worker can have one, else the CPU."""
    local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_workers:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join_group(device: torch.device) -> None:
    """Join the group that torchrun's environment describes: NCCL between GPUs, gloo between CPUs."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)


def check_world(job: Job) -> None:
    """The processes started must be those planned for.

    Raises:
        PlanError: otherwise.
    """
    world, needed = int(os.environ["WORLD_SIZE"]), job.plan.workers
    if world != needed:
        raise PlanError(
            f"plan '{job.plan.config}' needs {needed} workers, but {world} were started",
            hint=f"start torchrun with --nnodes times --nproc-per-node = {needed}",
        )


def check_schedule(plan: Plan) -> None:
    """The plan's depths must let its streams run: a plan edited by hand may deadlock.

    Raises:
        PlanError: when they do not.
    """
    shape = PipelineShape(
        ranks=tuple(stage.ranks for stage in plan.stages),
        channels=tuple(Channel(t.source, t.target, t.gradient_bytes > 0) for t in plan.transfers),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        depths=tuple(stage.in_flight for stage in plan.stages),
    )
    try:
        check_streams(shape, minibatches=4 * max(plan.replicas) * max(stage.in_flight for stage in plan.stages))
    except ScheduleError:
        depths = [stage.in_flight for stage in plan.stages]
        raise PlanError(
            f"the plan's stages wait for each other for ever: in_flight {depths} cannot feed '{plan.config}'",
            hint="make the plan again with: plan solve",
        ) from None


def train_worker(job: Job, on_progress: ProgressCallback | None = None) -> TrainResult | None:
    """Run this process's part of `job`; the environment is torchrun's.

    Returns:
        The result on rank 0, None elsewhere.

    Raises:
        PlannerError: for anything wrong with the model, the plan or the other workers.
    """
    check_world(job)
    check_schedule(job.plan)
    torch.set_num_threads(job.plan.device.threads or 1)
    part = StageReplica(job, load_model_file(job.model), local_device())
    join_group(part.device)
    try:
        return part.run(on_progress)
    finally:
        dist.destroy_process_group()


class StageReplica:
    """One replica of one stage of the job's plan, with everything it needs to run."""

    def __init__(self, job: Job, model_file: ModelFile, device: torch.device) -> None:
        plan = job.plan
        if plan.graph_hash is None or plan.microbatch_size is None:
            raise PlanError(
                f"the plan for '{plan.model}' comes from an imported profile, which holds no model to train",
                hint="profile your model file with: plan profile model.py",
            )
        self.job = job
        self.plan = plan
        self.device = device
        self.rank = int(os.environ["RANK"])
        self.index = next(index for index, stage in enumerate(plan.stages) if self.rank in stage.ranks)
        self.microbatch_size = plan.microbatch_size
        self.data = make_batches(model_file, self.microbatch_size, plan.microbatches, job.seed)
        self.minibatches = self.data.minibatches(job.steps, job.epochs)
        self.stage = _build_stage(plan, self.index, model_file, self.microbatch_size, job.seed, job.defer_weights).to(
            device
        )
        parameters = [p for p in self.stage.parameters() if p.requires_grad]
        self.optimizer = model_file.optimizer(parameters) if parameters else None
        specs: dict[str, ValueSpec] = {spec.name: spec for spec in (*self.stage.received, *self.stage.sent)}
        self.transfers = {
            (t.source, t.target): _specs_of(t, specs) for t in plan.transfers if self.index in (t.source, t.target)
        }
        self._layouts: dict[tuple[int, int, bool], Layout] = {}
        self.shape = PipelineShape(
            ranks=tuple(stage.ranks for stage in plan.stages),
            channels=tuple(Channel(t.source, t.target, self._returns_gradient(t)) for t in plan.transfers),
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            depths=tuple(stage.in_flight for stage in plan.stages),
        )

    def _returns_gradient(self, transfer: Transfer) -> bool:
        # Transfers between other stages do not show in this worker's stream.
        return any(spec.requires_grad for spec in self.transfers.get((transfer.source, transfer.target), ()))

    def run(self, on_progress: ProgressCallback | None) -> TrainResult | None:
        """Train, and gather what all workers measured on rank 0."""
        gradients, replicas = self._groups()
        weights_bytes = sum(t.numel() * t.element_size() for t in self.stage.state_dict().values())
        peak = PeakMemory(self.device, already_bytes=weights_bytes)
        links = Links(
            _world(),
            gradients,
            self._instructions,
            self._senders(),
            self._layout,
            keep=max(self.shape.in_flight(stage) for stage in range(len(self.plan.stages))),
            wire=self.device,
        )
        worker = Worker(
            self.stage,
            self.transfers,
            self.optimizer.step if self.optimizer is not None else None,
            links,
            GradientAverager(list(self.stage.parameters()), replicas) if replicas is not None else None,
            self.data,
            loss_scale=1 / self.plan.microbatches,
            seed=self.job.seed,
            recompute=self.plan.stages[self.index].recompute,
            on_update=self._progress(on_progress),
        )
        dist.barrier()
        start = time.perf_counter()
        worker.run(self._instructions())
        links.drain()
        dist.barrier()
        return self._result(worker, peak.bytes(), time.perf_counter() - start)

    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        """The gradients' group, and that of this stage's replicas: all workers make all groups in the same order."""
        gradients = dist.new_group(timeout=TIMEOUT)
        groups = [
            dist.new_group(list(stage.ranks), timeout=TIMEOUT) if stage.replicas > 1 else None
            for stage in self.plan.stages
        ]
        assert gradients is not None
        mine = groups[self.index]
        # Every replica starts from the same weights because all build the model from the same seed.
        return gradients, mine

    def _instructions(self) -> Iterable[Instruction]:
        return stream(self.shape, self.index, self.rank, self.minibatches)

    def _senders(self) -> list[tuple[type[Receive], int]]:
        """Who sends to this worker what."""
        senders: list[tuple[type[Receive], int]] = []
        for channel in self.shape.channels:
            if channel.target == self.index:
                senders += [(ReceiveActivation, rank) for rank in self._partners(channel.source)]
            if channel.source == self.index and channel.gradient:
                senders += [(ReceiveGradient, rank) for rank in self._partners(channel.target)]
        return senders

    def _partners(self, stage: int) -> list[int]:
        """Replicas of `stage` that ever share a unit with this one: their turns agree modulo the common divisor."""
        mine, theirs = self.shape.ranks[self.index], self.shape.ranks[stage]
        common = math.gcd(len(mine), len(theirs))
        turn = mine.index(self.rank)
        return [rank for other, rank in enumerate(theirs) if (turn - other) % common == 0]

    def _layout(self, message: Receive | Send) -> Layout:
        activation = isinstance(message, (ReceiveActivation, SendActivation))
        source, target = sorted((message.stage, message.peer_stage))
        kind = (source, target, activation)
        if kind not in self._layouts:
            specs = self.transfers[source, target]
            if not activation:
                specs = [spec.of_gradient for spec in specs if spec.requires_grad]
            self._layouts[kind] = layout_of(specs, self.microbatch_size)
        return self._layouts[kind]

    def _progress(self, on_progress: ProgressCallback | None) -> Callable[[int, WorkerLog], None] | None:
        last = self.plan.stages[-1]
        if on_progress is None or self.rank != last.ranks[0]:
            return None
        per_update = last.replicas if self.shape.asynchronous else 1
        return progress_reporter(
            on_progress, self.minibatches, per_update, self.microbatch_size * self.plan.microbatches
        )

    def _result(self, worker: Worker, peak_bytes: int, seconds: float) -> TrainResult | None:
        reports = gather_bytes(self._report(worker, peak_bytes).model_dump_json().encode(), self.device)
        losses = gather_bytes(encode_losses(worker.log.losses), self.device)
        if self.job.save_weights is not None:
            first = self.rank == self.plan.stages[self.index].ranks[0]
            state = gather_state(self.stage.state_dict() if first else {}, self.device)
            if self.rank == 0:
                save_state(state, Path(self.job.save_weights))
        if self.rank != 0:
            return None
        workers = tuple(WorkerReport.model_validate_json(report) for report in reports)
        minibatch_size = self.microbatch_size * self.plan.microbatches
        return TrainResult(
            config=self.plan.config,
            schedule=self.plan.schedule,
            workers=len(workers),
            minibatches=self.minibatches,
            minibatch_size=minibatch_size,
            samples=self.minibatches * minibatch_size,
            seconds=seconds,
            samples_per_s=sum(w.samples_per_s for w in workers if w.stage == len(self.plan.stages) - 1),
            predicted_samples_per_s=self.plan.predicted.samples_per_s,
            random_data=self.data.random,
            losses=merge_losses(losses),
            reports=workers,
            saved_weights=self.job.save_weights,
        )

    def _report(self, worker: Worker, peak_bytes: int) -> WorkerReport:
        depth = self.shape.in_flight(0)
        units = [Unit(0, microbatch) for microbatch in range(self.plan.microbatches)]
        mine = sum(self.shape.rank_of(self.index, unit) == self.rank for unit in units)
        steady = steady_state(
            worker.log.completions,
            start_up=2 * depth,
            drain=depth if self.shape.asynchronous else 0,
            per_round=1 if self.shape.asynchronous else mine,
        )
        return WorkerReport(
            rank=self.rank,
            stage=self.index,
            busy_share=steady.busy_share,
            samples_per_s=steady.units_per_s * self.microbatch_size,
            peak_memory_bytes=peak_bytes,
            predicted_memory_bytes=self.plan.stages[self.index].memory.total_bytes,
            weight_versions=worker.versions.most_versions,
        )


def _build_stage(
    plan: Plan, index: int, model_file: ModelFile, batch_size: int, seed: int, defer_weights: bool
) -> StageModule:
    """Build the model, capture it, and keep the layers of stage `index`; with `defer_weights`, make no other weights.

    Raises:
        PlanError: when the captured model is not the one that was profiled, or stages share a weight that is trained.
    """
    torch.manual_seed(seed)
    model = build_deferred(model_file.build_model, seed) if defer_weights else model_file.build_model()
    autocast = autocast_dtype(plan.autocast)
    graph = capture_file(model_file, model_file.example_batch(batch_size), model, autocast=autocast)
    if graph.hash != plan.graph_hash:
        raise PlanError(
            f"the plan was made for another model than '{model_file.path}': graph {plan.graph_hash} in the plan, "
            f"{graph.hash} captured",
            hint="profile and solve again: plan profile, plan solve",
        )
    trained = {name for name, parameter in graph.model.named_parameters() if parameter.requires_grad}
    if shared := shared_weight(plan, {layer.name: trained.intersection(layer.parameters) for layer in graph.layers}):
        raise PlanError(shared.sentence, hint=shared.hint)
    layers = plan.stages[index].layers
    if defer_weights:
        wanted = [name for layer in graph.layers if layer.name in set(layers) for name in layer.parameters]
        materialize(graph.model, model_file.build_model, seed, set(graph.names_of(wanted)))
    return build_stage(graph, layers)


def _specs_of(transfer: Transfer, specs: dict[str, ValueSpec]) -> list[ValueSpec]:
    missing = [name for name in transfer.values if name not in specs]
    if missing:
        raise PlanError(
            f"the plan sends value '{missing[0]}' from stage {transfer.source} to {transfer.target}, but the stages "
            "do not exchange it",
            hint="make the plan again with: plan solve",
        )
    return [specs[name] for name in transfer.values]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
