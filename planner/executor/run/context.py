"""Build what a worker needs before it trains: one frozen record that every later builder takes whole."""

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import PlanError
from planner.executor.communication.control import message_timeout
from planner.executor.communication.links import Receivers
from planner.executor.communication.sharding import Masters, Sharding
from planner.executor.communication.shared_gradients import SharedGradients
from planner.executor.run.comparison import BatchComparison, ComparedBatches
from planner.executor.run.data import (
    BatchSource,
    FedBatches,
    LengthDrift,
    OfRank,
    VaryingBatches,
    first_samples,
    make_batches,
    weighted,
)
from planner.executor.run.loss_check import LossCheck
from planner.executor.run.reading_ahead import AHEAD, ReadAhead
from planner.executor.run.stages import Modules, build_modules, check_sizes, divides_loss, tensor_group, transferred
from planner.executor.run.state_watch import StateWatch
from planner.executor.stage.optimizer import StageOptimizer
from planner.executor.stage.separate import check_separate
from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.batch_digest import digest_of
from planner.model.capture.graph import ValueSpec
from planner.model.lengths import Length, Varying, varying
from planner.model.loss import shares_by_samples, shares_function
from planner.model.options import gradient_dtype
from planner.model.spec import TrainingSpec
from planner.model.stage.code import check_compiler
from planner.model.stage.evaluation import EvaluationStages
from planner.model.stage.stage import StageModule, warm_up
from planner.plan.rank_groups import plan_of_tensor_rank, receivers, sample_parts
from planner.plan.shape import shape_of
from planner.profiler.this_machine import return_free_pages
from planner.runtime import runtime_of
from planner.schedule.derived import segment_stream, segments
from planner.schedule.instructions import LEAD, Instruction, Unit
from planner.schedule.schedule import PipelineShape
from planner.workers.groups import DataGroups
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.meeting import await_all
from planner.workers.place import Place

if TYPE_CHECKING:
    from planner.model.tensor.group import TensorGroup

_RESERVED = 1.1  # times what the plan predicts for tensors: the rest is for gaps between them


@dataclass(frozen=True)
class HeldStage:
    """A stage that this worker holds, on the device where it computes."""

    number: int
    module: StageModule
    optimizer: StageOptimizer
    shared: SharedGradients


@dataclass(frozen=True, kw_only=True)
class PipelineContext:
    """One worker's view of a job."""

    job: Job  # the same on all workers
    spec: TrainingSpec  # the model that `job.model` names
    place: Place  # where this worker computes
    rank: int
    heartbeat: Heartbeat
    data: BatchSource
    comparison: BatchComparison  # of what this worker reads with what others do
    initial_weights: Mapping[int, int]  # digests of its stages' parameters and buffers
    minibatches: int  # of the whole run
    groups: DataGroups
    shape: PipelineShape
    tensor: "TensorGroup | None" = None  # the ranks that divide this worker's layers with it
    stages: Mapping[int, HeldStage]  # of this worker, by number: one, or several chunks
    transfers: Mapping[tuple[int, int], Sequence[ValueSpec]]  # by (source, target) stage, to and from this worker's
    evaluation: EvaluationStages | None  # the same stages of the evaluation graph, if the job evaluates
    lengths: Sequence[Length] = ()  # of batches, that vary
    deferred: bool = False  # whether the weights of other stages were never made
    loss: LossMean | None = None  # what the loss is a mean over; None stands for the samples
    loss_check: LossCheck | None = None  # of the last stage, if this worker has it
    state_watch: StateWatch | None = None  # of what loss() and forward() read

    @cached_property
    def plan(self) -> Plan:
        """The plan of the job, as this rank sees it in its tensor-parallel group: see `plan_of_tensor_rank`."""
        return plan_of_tensor_rank(self.job.plan, 0 if self.tensor is None else self.tensor.place)

    @property
    def leads_tensor_group(self) -> bool:
        """Whether this worker reports and saves what all ranks of its group have alike."""
        return self.tensor is None or self.tensor.place == 0

    @property
    def microbatch_size(self) -> int:
        assert self.plan.microbatch_size is not None  # or making the context had failed
        return self.plan.microbatch_size

    @property
    def minibatch_size(self) -> int:
        return self.microbatch_size * sample_parts(self.job.plan) * self.data.microbatches

    @property
    def sizes(self) -> set[int]:
        """Sizes of all microbatches that have samples."""
        return {self.microbatch_size, *filter(None, self.data.last_sizes)}

    def lengths_of(self, unit: Unit) -> dict[str, int]:
        """Return the lengths of a microbatch by their names in lengths(); none where these do not vary."""
        extent = self.data.extent(unit)
        if isinstance(extent, int) or self._varying is None:
            return {}
        sizes = {(each.leaf, each.dimension): size for each, size in zip(self.lengths, extent[1:], strict=True)}
        return dict(zip(self.spec.lengths(), self._varying.by_name(sizes), strict=True))

    @cached_property
    def _varying(self) -> Varying | None:
        return varying(self.spec, 2)

    def await_models(self) -> None:
        """Wait until all workers have built their models, before the first operation that has a time-out."""
        self.heartbeat.enter("waiting for the others to build their models", meeting=True)
        await_all("models")

    def connect(self) -> None:
        """Use every process group once, and take memory; all workers call it, with nothing under way.

        A device's memory that the allocator does not have yet, pinned memory, and kernels at their first use may wait
        for the whole device, and so for messages that other workers' hosts have yet to post.
        """
        self.heartbeat.enter("waiting for the others to be ready", meeting=True)
        await_all("ready")  # one may have read a large checkpoint
        self.heartbeat.enter("connecting to the other workers", meeting=True)
        self.groups.use_once()
        self.comparison.begin()
        for number, digest in self.initial_weights.items():
            self.comparison.check_weights(number, 0 if self.tensor is None else self.tensor.place, digest)
        self.heartbeat.enter("taking memory", meeting=True)
        compute, runtime = self.place.compute, runtime_of(self.place.compute)
        if not runtime.asynchronous:
            return
        tensors_bytes = int(self.plan.tensor_bytes(min(self.stages)) * _RESERVED)
        # The allocator still has what the stages took when they ran once.
        if self.plan.stages[0].level < 2:  # the streams of fully_shard take memory of their own
            runtime.reserve(compute, max(0, tensors_bytes - runtime.peak_bytes(compute)))
        copies = LEAD + AHEAD + max(map(self.shape.in_flight, self.stages))
        for size in self.sizes:
            batch = self.spec.example_batch(size)
            held = [batch.pinned(compute) for _ in range(copies)]  # the allocator of pinned memory keeps it, too
            del held
        if self.tensor is not None or self.plan.stages[0].level > 1:  # others were run before; these run together
            self.run_once((stage.module for stage in self.stages.values()), self.sizes)
        if self.evaluation is not None:
            with torch.no_grad():
                self.run_once(self.evaluation.modules.values(), [self.evaluation.batch_size or self.microbatch_size])

    def run_once(self, modules: Iterable[StageModule], sizes: Iterable[int]) -> None:
        """Run stages on batches of `sizes` samples, the shortest and the longest, and leave no trace of it."""
        compute = self.place.compute
        with runtime_of(compute).random_state_kept(compute):
            between = self.spec.lengths().items()
            extremes = [{name: pair[end] for name, pair in between} for end in (range(2) if between else range(1))]
            made = (self.spec.example_batch(size, lengths) for size, lengths in product(sizes, extremes))
            batches = [batch.to(compute) for batch in made]
            for module, batch in product(modules, batches):
                warm_up(module, batch)

    def stream(self, first: int, last: int) -> Iterator[Instruction]:
        """Yield this worker's instructions for minibatches `first` to `last` (exclusive), from an empty pipeline."""
        return segment_stream(self.shape, min(self.stages), self.rank, first, last)

    def shapes_of_tensor_ranks(self, shape: PipelineShape) -> list[PipelineShape]:
        """Return a shape for each place in the tensor-parallel groups; a rank's own is the first that has the rank."""
        plans = (plan_of_tensor_rank(self.job.plan, place) for place in range(max(self.job.plan.degrees)))
        return [replace(shape, ranks=tuple(stage.ranks for stage in plan.stages)) for plan in plans]

    @property
    def receivers(self) -> Receivers | None:
        """Who takes what a rank sends: ranks of the other stage's group; None where all groups have one size."""
        plan = self.job.plan
        if len(set(plan.degrees)) == 1:
            return None
        return lambda rank, send: receivers(plan, send.stage, rank, send.peer_stage, send.peer_rank)

    def segments(self, first: int) -> Iterator[tuple[int, int]]:
        """Return the parts of the run from minibatch `first` on, between which the pipeline runs empty."""
        elastic = self.job.elastic
        copies = None if elastic.elastic is None else elastic.copy_every
        return segments(first, self.minibatches, self.job.checkpoints.every, copies)

    def is_first_replica(self, stage: int) -> bool:
        """Return whether this worker, or its tensor-parallel group, is the first replica of `stage`."""
        return self.rank == self.plan.stages[stage].ranks[0]


def pipeline_context(
    job: Job, spec: TrainingSpec, place: Place, heartbeat: Heartbeat | None = None, data: BatchSource | None = None
) -> PipelineContext:
    """Build this worker's stages, with their optimizers and data; `data` replaces the model file's dataset."""
    rank, options, heartbeat = int(os.environ["RANK"]), job.options, heartbeat or Heartbeat()
    numbers = [number for number, stage in enumerate(job.plan.stages) if rank in stage.ranks]
    tensor = tensor_group(job.plan, rank)
    ranks = sample_parts(job.plan)
    made = None

    def read_first() -> list[Batch]:
        nonlocal made
        made = _made_batches(job, spec, ranks, place.compute)
        return first_samples(made)

    built = build_modules(
        job,
        numbers,
        spec,
        place.compute.type,
        tensor,
        read_samples=read_first if data is None else list,
    )
    check_separate(spec, job.plan, built.trained, built.parts, place.compute)
    plan = plan_of_tensor_rank(job.plan, 0 if tensor is None else tensor.place)
    # Without build_model(), which keeps a model in memory alive.
    spec = replace(spec, functions={name: f for name, f in spec.functions.items() if name != "build_model"})
    # The graphs are full of cycles; with them go the weights of other stages, if they were made.
    gc.collect()
    modules = built.training
    # While all is on the CPU, and before replicas divide weights.
    initial_weights = {number: digest_of(module.state_dict().values()) for number, module in modules.items()}
    transfers = transferred(plan, modules)
    groups, everywhere = DataGroups(place, message_timeout(job.run_options.hang_timeout_s)), None
    if plan.stages[0].level > 1:  # the stage moves when it is divided, unit by unit
        heartbeat.enter("waiting for the others to build their models", meeting=True)
        await_all("models")
        everywhere = groups.for_collectives(None)
    for module in modules.values() if everywhere is None else ():
        module.to(place.compute)
    return_free_pages()  # of the model: workers keep what they free for the next step otherwise

    comparison = BatchComparison(rank)
    reads_dataset = data is None
    shape = replace(shape_of(plan), shared=tuple(sorted(built.shared)))
    if data is None:
        made = made or _made_batches(job, spec, ranks, place.compute)
        whole = any(module.has_loss for module in modules.values())
        data = ReadAhead(weighted(made, built.loss, spec, whole=whole), place.compute)
    if isinstance(data, FedBatches):
        data.check_sizes_by(built.other_sizes)
    if tensor is not None and plan.by_samples:
        if built.lengths:
            raise PlanError(
                "the executor does not divide experts over ranks where the lengths of batches vary",
                hint="pad all batches alike and leave lengths() out, or solve with `tensor=1`",
            )
        data = OfRank(data, tensor.place, ranks)
    if built.lengths:
        drift = LengthDrift(plan.lengths, plan.microbatches, spec) if plan.lengths is not None and rank == 0 else None
        data = VaryingBatches(data, built.lengths, drift)
    if reads_dataset:
        data = ComparedBatches(data, comparison)
    check_sizes(modules.values(), data.last_sizes, built.other_sizes, spec)
    held = {}
    for number, module in modules.items():
        shared = SharedGradients(number, module, built.shared)
        together = shape.minibatches_per_update(number) if options.scale_lr else 1
        optimizer = StageOptimizer(
            spec,
            module,
            learning_rate_factor=together / (1 + options.late_lr * shape.late(number)),
            clip_grad_norm=options.clip_grad_norm,
            scale_loss=job.scales_loss,
            sharding=sharding_of(plan.stages[number], module, shared, rank, place.wire)
            if everywhere is None
            else full_sharding(module, plan.stages[number].level, everywhere, place),
            whole=built.trained,
        )
        held[number] = HeldStage(number, module, optimizer, shared)
    minibatches = data.minibatches(job.steps, job.epochs)
    if job.baseline is not None and not shape.schedule.divides:
        minibatches = -(-minibatches // plan.workers) * plan.workers  # DistributedDataParallel waits for every worker
    context = PipelineContext(
        job=job,
        spec=spec,
        place=place,
        rank=rank,
        heartbeat=heartbeat,
        data=data,
        comparison=comparison,
        initial_weights=initial_weights,
        minibatches=minibatches,
        groups=groups,
        shape=shape,
        tensor=tensor,
        stages=held,
        transfers=transfers,
        evaluation=built.evaluation,
        lengths=built.lengths,
        deferred=built.deferred,
        loss=built.loss,
        loss_check=_loss_check(job, spec, built, minibatches - 1),
        state_watch=_state_watch(spec, built, minibatches - 1),
    )
    alone = tensor is None and everywhere is None  # others run together
    if (plan.compiled or runtime_of(place.compute).asynchronous) and alone:
        # A worker that compiles in the middle of a run looks as if it hung. On a GPU kernels and the handles of
        # libraries are loaded at their first use, which may wait for the whole device.
        context.heartbeat.enter("compiling its stages" if plan.compiled else "warming its stages up")
        if plan.compiled:
            check_compiler(place.compute.type)
        context.run_once(modules.values(), context.sizes)
    return context


def _state_watch(spec: TrainingSpec, built: Modules, last: int) -> StateWatch | None:
    if built.state is None:
        return None
    return StateWatch(built.state, last, runs_blocks=spec.defines("blocks"))


def _loss_check(job: Job, spec: TrainingSpec, built: Modules, last: int) -> LossCheck | None:
    """Return what compares the loss that is trained on with the user's; None where this worker has no loss."""
    stage = built.training.get(len(job.plan.stages) - 1)
    if built.output is None or stage is None:
        return None
    mean = built.loss or LossMean(over="samples")
    shares = shares_function(mean, spec) or shares_by_samples
    is_divided = divides_loss(job) and mean.divisible
    return LossCheck(
        spec,
        built.output,
        stage.options,
        mean,
        shares if is_divided else None,
        captured=not spec.defines("blocks"),
        last=last,
    )


def _made_batches(job: Job, spec: TrainingSpec, ranks: int, device: torch.device) -> BatchSource:
    plan = job.plan
    assert plan.microbatch_size is not None  # or building the modules had failed
    return make_batches(
        spec,
        plan.microbatch_size,
        ranks * plan.microbatches,
        job.seed,
        drop_last=job.options.drop_last,
        device=device,
    )


def sharding_of(
    stage: Stage, module: nn.Module, shared: SharedGradients, rank: int, wire: torch.device
) -> Sharding | None:
    """Return a worker's share of a stage's optimizer; None where each replica has the whole of it."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not stage.sharded or not trained:
        return Masters(trained) if any(gradient_dtype(each) != each.dtype for each in trained) else None
    # In the order of the process group, which torch sorts by rank: the plan's may be another.
    member = sorted(stage.ranks).index(rank), stage.replicas
    return Sharding(trained, member, shared.parameters.values(), wire)


def full_sharding(module: StageModule, level: int, replicas: dist.ProcessGroup, place: Place) -> Sharding:
    """Return a worker's share of a stage of level 2 or 3; raise PlanError where replicas cannot exchange weights."""
    # DTensor takes a second to import.
    from planner.executor.communication.fully_sharded import FullSharding

    if place.wire.type != place.compute.type:
        problem = f"replicas that divide weights exchange them on the {place.compute.type}, not over {place.backend}"
        raise PlanError(problem, hint="leave out `backend`, with a GPU for each worker; or solve without such stages")
    return FullSharding(module, level, replicas, place.compute)
