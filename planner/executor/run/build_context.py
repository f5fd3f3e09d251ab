"""Build a worker's stages, their optimizers and data, and the record that holds them:
`PipelineContext`.
"""

import gc
import os
from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import nn

from planner.errors import PlanError
from planner.executor.communication.control import message_timeout
from planner.executor.communication.sharding import Masters, Sharding
from planner.executor.communication.shared_gradients import SharedGradients
from planner.executor.run.comparison import BatchComparison, ComparedBatches, Fact
from planner.executor.run.context import HeldStage, PipelineContext
from planner.executor.run.data import BatchSource, first_samples
from planner.executor.run.loss_check import LossCheck
from planner.executor.run.stages import (
    Modules,
    build_modules,
    check_sizes,
    divides_loss,
    tensor_group,
    transferred,
)
from planner.executor.run.state_watch import StateWatch
from planner.executor.run.worker_data import (
    batches_of_file,
    data_facts,
    divided_data,
    read_by_worker,
)
from planner.executor.stage.optimizer import StageOptimizer
from planner.executor.stage.separate import check_separate
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.batch_digest import digest_of
from planner.model.loss import shares_by_samples, shares_function
from planner.model.options import gradient_dtype
from planner.model.spec import TrainingSpec
from planner.model.stage.code import check_compiler
from planner.model.stage.stage import StageModule
from planner.plan.left_out import measured_stage
from planner.plan.rank_groups import plan_of_tensor_rank
from planner.plan.shape import shape_of
from planner.profiler.this_machine import return_free_pages
from planner.runtime import runtime_of
from planner.schedule.schedule import PipelineShape
from planner.workers.groups import DataGroups, ShardGroups
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.meeting import await_all
from planner.workers.place import Place


def pipeline_context(
    job: Job,
    spec: TrainingSpec,
    place: Place,
    heartbeat: Heartbeat | None = None,
    data: BatchSource | None = None,
) -> PipelineContext:
    """Build this worker's stages, with their optimizers and data; `data` replaces the model file's
    dataset.

    Raises:
        PlannerError: when the plan, the model file and this worker do not fit together.
    """
    heartbeat = heartbeat or Heartbeat()
    rank = int(os.environ["RANK"])
    comparison = BatchComparison(rank)
    tensor = tensor_group(job.plan, rank)
    plan = plan_of_tensor_rank(job.plan, 0 if tensor is None else tensor.place)
    # What stays must not keep a model in memory alive.
    lasting = _without_builder(spec)
    read = None
    if data is None:
        read = cache(partial(batches_of_file, job, lasting, place.compute))

    def read_samples() -> list[Batch]:
        if read is None:
            return []
        return first_samples(read())

    numbers = [number for number, stage in enumerate(job.plan.stages) if rank in stage.ranks]
    is_left_out = not numbers
    if is_left_out:
        numbers = [measured_stage(job.plan)]
    built = build_modules(job, numbers, spec, place.compute.type, tensor, read_samples=read_samples)
    measured = None
    if is_left_out:
        built, measured = _without_stages(built)
        measured.to(place.compute)

    check_separate(spec, job.plan, built.trained, built.parts, place.compute)
    # The graphs are full of cycles; with them go the weights of other stages, if they were made.
    gc.collect()

    # While all is on the CPU, and before replicas divide weights.
    facts = facts_of_stages(built.training, 0 if tensor is None else tensor.place)
    facts += data_facts(read, built, lasting)
    groups = DataGroups(place, message_timeout(job.run_options.hang_timeout_s))
    everyone = _move(built.training, plan, place, groups, heartbeat)
    return_free_pages()  # of the model: workers keep what they free for the next step otherwise

    if read is None:
        assert data is not None
        data = divided_data(data, job.plan, built, lasting, rank, tensor)
    else:
        data = read_by_worker(read, built, lasting, comparison, place.compute)
        data = ComparedBatches(
            divided_data(data, job.plan, built, lasting, rank, tensor), comparison
        )

    check_sizes(built.training.values(), data.last_sizes, built.other_sizes, lasting)

    shape = replace(
        shape_of(plan),
        shared=tuple(sorted(built.shared)),
        sums_in_replicas=plan.divides_sequences,
    )
    stages = _with_optimizers(built, job, lasting, plan, shape, place, rank, everyone)
    facts += _facts_of_optimizers(stages)
    minibatches = _minibatches(job, plan, shape, data)
    context = PipelineContext(
        job=job,
        spec=lasting,
        place=place,
        rank=rank,
        heartbeat=heartbeat,
        data=data,
        comparison=comparison,
        facts=facts,
        minibatches=minibatches,
        groups=groups,
        shape=shape,
        tensor=tensor,
        stages=stages,
        measured=measured,
        transfers=transferred(plan, built.training),
        evaluation=built.evaluation,
        lengths=built.lengths,
        deferred=built.deferred,
        loss=built.loss,
        loss_check=_loss_check(job, lasting, built, last=minibatches - 1),
        state_watch=_state_watch(lasting, built, last=minibatches - 1),
    )
    if tensor is None and everyone is None:  # others run together
        _run_first(context)
    return context


def _without_stages(built: Modules) -> tuple[Modules, StageModule]:
    """Return what a worker without stages has of the model, and the stage that it measures."""
    (measured,) = built.training.values()
    evaluation = built.evaluation
    if evaluation is not None:
        evaluation = replace(evaluation, modules={})
    return replace(built, training={}, evaluation=evaluation), measured


def _without_builder(spec: TrainingSpec) -> TrainingSpec:
    """Return what trains a model that is built, without what leads to the whole model."""
    functions = {
        name: function for name, function in spec.functions.items() if name != "build_model"
    }
    return replace(spec, functions=functions, objects=None)


def facts_of_stages(modules: Mapping[int, StageModule], place: int) -> list[Fact]:
    """Return the initial weights and buffers of a worker's stages, which replicas must have alike.

    Args:
        modules: by the stage's number.
        place: of this rank in its group, where ranks divide the stages' layers.
    """
    return [
        Fact(
            what=f"the initial state of stage {number}",
            digest=digest_of(module.state_dict().values()),
            turn=place,
        )
        for number, module in modules.items()
    ]


def _facts_of_optimizers(stages: Mapping[int, HeldStage]) -> list[Fact]:
    digests = (stage.optimizer.groups_digest for stage in stages.values())
    return [Fact("what optimizer() returns", digest) for digest in digests if digest is not None]


def _move(
    modules: Mapping[int, StageModule],
    plan: Plan,
    place: Place,
    groups: DataGroups,
    heartbeat: Heartbeat,
) -> ShardGroups | None:
    """Move the stages to the device; return the groups of all workers where these divide weights.

    Then the stage moves when it is divided, unit by unit.
    """
    stage = plan.stages[0]
    if stage.shards_gradients:
        heartbeat.enter("waiting for the others to build their models", meeting=True)
        await_all("models")
        return groups.for_shards(stage.shard_groups(stage.ranks))

    for module in modules.values():
        module.to(place.compute)
    return None


def _with_optimizers(
    built: Modules,
    job: Job,
    spec: TrainingSpec,
    plan: Plan,
    shape: PipelineShape,
    place: Place,
    rank: int,
    everyone: ShardGroups | None,
) -> dict[int, HeldStage]:
    """Return this worker's stages with their optimizers; `everyone` has the groups of workers that
    divide weights.
    """
    options = job.options
    stages = {}
    for number, module in built.training.items():
        shared = SharedGradients(number, module, built.shared, module.off_loss)
        if everyone is None:
            sharding = sharding_of(plan.stages[number], module, shared, rank, place.wire)
        else:
            # code that is not captured may leave weights out that others used
            alike = not spec.defines("blocks")
            sharding = full_sharding(module, plan.stages[number], everyone, place, alike=alike)
        minibatches = 1
        if options.scale_lr:
            minibatches = shape.minibatches_per_update(number)
        optimizer = StageOptimizer(
            spec,
            module,
            learning_rate_factor=minibatches / (1 + options.late_lr * shape.late(number)),
            clip_grad_norm=options.clip_grad_norm,
            scale_loss=job.scales_loss,
            sharding=sharding,
            whole=built.trained,
        )
        stages[number] = HeldStage(number, module, optimizer, shared)

    return stages


def _minibatches(job: Job, plan: Plan, shape: PipelineShape, data: BatchSource) -> int:
    minibatches = data.minibatches(job.steps, job.epochs)
    if job.baseline is None or shape.schedule.divides:
        return minibatches
    # DistributedDataParallel waits for every worker.
    return -(-minibatches // plan.workers) * plan.workers


def _state_watch(spec: TrainingSpec, built: Modules, last: int) -> StateWatch | None:
    """Return what compares the numbers of Python that the model reads; `last` is the number of the
    last minibatch.
    """
    if built.state is None:
        return None
    return StateWatch(built.state, last, runs_blocks=spec.defines("blocks"))


def _loss_check(job: Job, spec: TrainingSpec, built: Modules, last: int) -> LossCheck | None:
    """Return what compares the loss that is trained on with the user's; None where this worker has
    no loss.
    """
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


def _run_first(context: PipelineContext) -> None:
    """Run the stages once where that may take long, or wait for the whole device.

    A worker that compiles in the middle of a run looks as if it hung. On a GPU kernels and the
    handles of libraries are loaded at their first use.
    """
    compute = context.place.compute
    compiles = context.plan.compiled
    if not compiles and not runtime_of(compute).asynchronous:
        return

    context.heartbeat.enter("compiling its stages" if compiles else "warming its stages up")
    if compiles:
        check_compiler(compute.type)
    context.run_once((stage.module for stage in context.stages.values()), context.sizes)


def sharding_of(
    stage: Stage, module: nn.Module, shared: SharedGradients, rank: int, wire: torch.device
) -> Sharding | None:
    """Return a worker's share of a stage's optimizer; None where each replica has the whole
    of it.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not stage.shards_optimizer or not trained:
        if not any(gradient_dtype(each) != each.dtype for each in trained):
            return None
        return Masters(trained)
    # In the order of the process group, which torch sorts by rank: the plan's may be another.
    member = sorted(stage.ranks).index(rank), stage.replicas
    return Sharding(trained, member, shared.parameters.values(), wire)


def full_sharding(
    module: StageModule, stage: Stage, groups: ShardGroups, place: Place, *, alike: bool
) -> Sharding:
    """Return a worker's share of a stage of level 2 or 3; raise PlanError where replicas cannot
    exchange weights.
    """
    # DTensor takes a second to import.
    from planner.executor.communication.fully_sharded import FullSharding

    if place.wire.type != place.compute.type:
        problem = (
            f"replicas that shard weights exchange them on the {place.compute.type}, not "
            f"over {place.backend}"
        )
        raise PlanError(
            problem,
            hint="leave out `backend`, with a GPU for each worker; or solve without such stages",
        )

    return FullSharding(
        module, groups, place.compute, shards_weights=stage.shards_weights, alike=alike
    )
