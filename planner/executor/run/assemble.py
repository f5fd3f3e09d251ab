"""Connect a worker with the others: process groups, messages, checkpoints; in the joined group."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist

from planner.errors import InputError
from planner.executor.checkpoint.checkpointer import Checkpointer, DataPosition
from planner.executor.checkpoint.stage_parts import Restorable
from planner.executor.communication.control import control_group
from planner.executor.communication.links import Segments, SendLimits
from planner.executor.communication.messages import Layouts
from planner.executor.communication.nccl_links import links_over
from planner.executor.communication.routes import LinkGroups
from planner.executor.run.context import PipelineContext
from planner.executor.run.replica import StageReplica
from planner.executor.run.worker import Observers, PipelineWorker
from planner.executor.stage.optimizer import JointNorm
from planner.formats.names import CODECS
from planner.options.training import CheckpointOptions
from planner.plan.rank_groups import groups_of_ranks
from planner.schedule.instructions import Instruction
from planner.schedule.schedule import PipelineShape, stream


@dataclass(frozen=True)
class Groups:
    """The process groups that every pipeline needs; `replicas` has one for each replicated stage of this worker."""

    links: LinkGroups
    replicas: Mapping[int, dist.ProcessGroup]

    @classmethod
    def create(cls, context: PipelineContext) -> Groups:
        """Make the groups. torch.distributed wants every worker to make every group, in the same order."""
        by_tensor_rank = list(zip(*map(context.shapes_of_tensor_ranks, context.shapes), strict=True))
        streams = (dict(all_streams(*shapes)) for shapes in by_tensor_rank)
        links = LinkGroups.create(context.groups, lambda: ChainMap(*streams), context.receivers)
        for ranks in groups_of_ranks(context.job.plan):
            group = context.groups.of(ranks)
            if context.tensor is not None and context.rank in ranks:
                context.tensor.connect(group, context.place.compute)
        replicas = {}
        # Stages whose groups are smaller than others come several times, once for each place in larger groups.
        for index, ranks in dict.fromkeys(each for shape, *_ in by_tensor_rank for each in enumerate(shape.ranks)):
            made = context.groups.of(ranks) if len(ranks) > 1 else None
            if made is not None and context.rank in ranks:
                replicas[index] = made
        return cls(links, replicas)


def all_streams(*shapes: PipelineShape) -> Mapping[int, Iterable[Instruction]]:
    """Return all workers' streams of as many minibatches as it takes replicas to meet all those that they ever meet.

    Streams of several shapes, which have the same stages, follow one another.
    """
    minibatches = math.lcm(*shapes[0].replicas)
    return {
        # A list, because streams that were made later would all be of the last rank.
        rank: chain(*[stream(shape, stage, rank, minibatches) for shape in shapes])
        for rank, stage in shapes[0].first_stages.items()
    }


def make_worker(
    context: PipelineContext, groups: Groups, observers: Observers, instructions: Callable[[], Segments]
) -> PipelineWorker:
    """Connect this worker's stages with their replicas and neighbours.

    Args:
        instructions: makes a copy of the worker's stream by segments, as far as it is known: links look ahead in it.
    """
    held = context.stages
    shared = {number: stage.shared for number, stage in held.items()}
    codec = CODECS[context.plan.cluster.compress]
    layouts = Layouts(context.transfers, shared, context.data.size, with_scale=context.job.scales_loss, codec=codec)
    in_flight = max(shape.in_flight(stage) for shape in context.shapes for stage in range(len(context.plan.stages)))
    limits = SendLimits(in_flight, context.shape.lag)
    links = links_over(context.place)(groups.links, layouts.layout, limits, context.place, instructions())
    stages = {number: StageReplica(stage, context, groups.replicas.get(number)) for number, stage in held.items()}
    stop_on_nan = context.job.run_options.stop_on_nan
    return PipelineWorker(
        stages, links, observers, context.place.compute, stop_on_nan=stop_on_nan, joint_norm=_joint_norm(context)
    )


def _joint_norm(context: PipelineContext) -> JointNorm | None:
    """Make the norm over all stages, if they clip or scale; under asynchronous schedules each stage is by itself."""
    needed = context.job.options.clip_grad_norm is not None or context.job.scales_loss
    if not needed or context.shape.asynchronous:
        return None
    return JointNorm(control_group())


def restore(context: PipelineContext) -> tuple[Checkpointer | None, int]:
    """Resume from the job's checkpoint, if there is one.

    Returns:
        The checkpointer, None for a job without checkpoints; and the number of minibatches done before.

    Raises:
        InputError: when the checkpoint does not fit the run.
    """
    job, data = context.job, context.data
    if job.checkpoints.every is None and job.checkpoints.resume is None:
        return None, 0
    checkpointer = make_checkpointer(context, job.checkpoints, None if data.random else data.minibatches(None, 1))
    first = checkpointer.restore()
    if first > context.minibatches:
        raise InputError(
            f"the checkpoint '{checkpointer.resumed_from}' is of a run of {first} minibatches, and the whole run is "
            f"to have {context.minibatches}",
            hint="`steps` and `epochs` count from the beginning of the first run",
        )
    return checkpointer, first


def make_checkpointer(context: PipelineContext, options: CheckpointOptions, per_epoch: int | None) -> Checkpointer:
    """Return what writes and reads checkpoints of this worker's stages; all workers call it.

    Args:
        per_epoch: minibatches; None without a dataset.
    """
    own = [
        Restorable(
            number,
            context.plan.stages[number].ranks.index(context.rank),
            stage.module,
            stage.optimizer.optimizer,
            stage.optimizer.learning_rate_factor,
            stage.optimizer.sharding,
            stage.optimizer.extras,
        )
        for number, stage in context.stages.items()
    ]
    job = context.job.model_copy(update={"checkpoints": options})
    return Checkpointer(job, own, DataPosition(context.minibatch_size, per_epoch), context.heartbeat)
