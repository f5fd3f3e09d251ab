"""The loop of one worker in the joined group, which `planner.train` and a user's own loop drive
alike.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from planner.executor.checkpoint.checkpointer import Checkpointer, DataPosition
from planner.executor.checkpoint.stage_parts import Restorable
from planner.executor.checkpoint.trained_weights import save_gathered
from planner.executor.communication.control import control_group, message_timeout
from planner.executor.communication.links import Ahead, LinkGroups
from planner.executor.communication.messages import Layouts
from planner.executor.communication.nccl_links import links_over
from planner.executor.run.context import PipelineContext
from planner.executor.run.data import ENDLESS, EvaluationData
from planner.executor.run.evaluator import (
    Evaluator,
    MessagesUnderWay,
    until_updated,
    updates_between,
)
from planner.executor.run.replica import StageReplica
from planner.executor.run.worker import Observers, PipelineWorker
from planner.formats.files import replace
from planner.formats.names import CODECS
from planner.model.tensor.division import whole_state
from planner.options.training import CheckpointOptions
from planner.plan.rank_groups import groups_of_ranks
from planner.schedule.instructions import (
    AddShared,
    AllReduce,
    Instruction,
    ReceiveShared,
    SendShared,
    Update,
)
from planner.schedule.schedule import PipelineShape, stream
from planner.workers.groups import GLOO
from planner.workers.job import Evaluation


@dataclass(frozen=True)
class Groups:
    """The process groups that every pipeline needs.

    Attributes:
        links: between stages.
        replicas: one for each replicated stage of this worker.
        sums: by stage, the workers whose gradients add up: the replicas, and where ranks divide
            sequences all ranks of all replicas.
        joint: of all workers with stages, where these clip or scale their gradients together.
    """

    links: LinkGroups
    replicas: Mapping[int, dist.ProcessGroup]
    sums: Mapping[int, dist.ProcessGroup]
    joint: dist.ProcessGroup | None

    @classmethod
    def create(cls, context: PipelineContext) -> "Groups":
        """Make the groups. torch.distributed wants every worker to make every group, in the same
        order.
        """
        shapes = context.shapes_of_tensor_ranks(context.shape)
        streams = {
            rank: stream
            for shape in reversed(shapes)
            for rank, stream in all_streams(shape).items()
        }
        links = LinkGroups(context.groups, streams, context.receivers)
        for ranks in groups_of_ranks(context.job.plan):
            group = context.groups.for_collectives(ranks)
            if context.tensor is not None and context.rank in ranks:
                context.tensor.connect(group, context.place.compute)

        replicas = {}
        # Stages whose groups are smaller than others come several times, once for each place in
        # larger groups.
        for index, ranks in dict.fromkeys(
            each for shape in shapes for each in enumerate(shape.ranks)
        ):
            made = context.groups.for_collectives(ranks) if len(ranks) > 1 else None
            if made is not None and context.rank in ranks:
                replicas[index] = made

        sums = replicas
        if context.job.plan.divides_sequences:
            sums = _groups_of_sequences(context)
        return cls(links, replicas, sums, _joint_group(context))


def _groups_of_sequences(context: PipelineContext) -> dict[int, dist.ProcessGroup]:
    """Return the groups in which ranks that divide sequences add up the gradients of all weights,
    by this worker's stages; all workers call it.

    Stages of the same ranks have a group each: replicas with different numbers of microbatches may
    come to their all-reduces in different orders.
    """
    groups = {}
    for index, stage in enumerate(context.job.plan.stages):
        made = context.groups.for_collectives(tuple(stage.ranks))
        if context.rank in stage.ranks:
            groups[index] = made

    return groups


def _joint_group(context: PipelineContext) -> dist.ProcessGroup | None:
    """Return the group in which stages add up the norms of their gradients; all workers call it."""
    job = context.job
    needs_norm = job.options.clip_grad_norm is not None or job.scales_loss
    # Under asynchronous schedules each stage clips and scales by itself.
    if not needs_norm or context.shape.asynchronous:
        return None
    ranks = sorted(context.job.plan.ranks)
    if len(ranks) == dist.get_world_size():
        return control_group()
    timeout = message_timeout(job.run_options.hang_timeout_s)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=GLOO)
    return group


def all_streams(shape: PipelineShape) -> Mapping[int, Iterable[Instruction]]:
    """Return all workers' streams, long enough that each replica exchanges messages with all that
    it ever does.

    Of a million microbatches the first few do: replicas take turns.
    """
    minibatches = math.lcm(*shape.replicas)
    few = shape.shortened(minibatches)
    return {rank: stream(few, stage, rank, minibatches) for rank, stage in few.first_stages.items()}


def make_worker(context: PipelineContext, groups: Groups, observers: Observers) -> PipelineWorker:
    """Connect this worker's stages with their replicas and neighbours."""
    job = context.job
    held = context.stages
    layouts = Layouts(
        context.transfers,
        {number: stage.shared for number, stage in held.items()},
        context.data.extent,
        tuple(length.most for length in context.lengths),
        with_scale=job.scales_loss,
        codec=CODECS[context.plan.cluster.compress],
    )
    in_flight = max(map(context.shape.in_flight, range(len(context.plan.stages))))
    links = links_over(context.place)(
        groups.links, layouts.layout, in_flight, context.place, context.shape.lag
    )
    links.reserve(layouts, context.microbatch_size)
    stages = {
        number: StageReplica(stage, context, groups.sums.get(number))
        for number, stage in held.items()
    }
    return PipelineWorker(
        stages,
        links,
        observers,
        context.place.compute,
        stop_on_nan=job.run_options.stop_on_nan,
        joint_group=groups.joint,
    )


class Loop:
    """One worker's part of the training of a plan; all workers make theirs together, because it
    makes process groups.

    Links look `ahead` in the stream, where it is known in advance.
    """

    def __init__(
        self,
        context: PipelineContext,
        groups: Groups,
        observers: Observers,
        *,
        ahead: bool = False,
        evaluation_data: EvaluationData | None = None,
    ) -> None:
        self.worker = make_worker(context, groups, observers)
        self.evaluator = None
        if context.evaluation is not None:
            self.evaluator = Evaluator(context, groups.replicas, groups.links, evaluation_data)
        self.evaluations: list[Evaluation] = []  # so far, on the worker that has their results
        self._context = context
        self._ahead = ahead
        self.begin(0)

    def begin(
        self, first: int, last: int = ENDLESS, ends_at: Callable[[int], bool] | None = None
    ) -> None:
        """Begin a stream of the minibatches from `first` to before `last`, with an empty
        pipeline.

        Args:
            first: minibatch.
            last: where the stream ends, unless it ends before.
            ends_at: is asked before each minibatch whether the stream ends before it. All workers'
                answers are the same.
        """
        self.first = first
        self._last = last
        stream = self._context.stream(first, last)
        self._stream = Ahead(stream if ends_at is None else self._ending(stream, ends_at))
        if self._ahead:
            self.worker.links.follow(self._stream)
        self._next: Instruction | None = None
        self._executed = 0
        self._messages: MessagesUnderWay | None = None
        self._point = first  # of the last evaluation
        for stage in self.worker.stages.values():
            # each segment of a stream counts versions of the weights from 0
            stage.versions.restart()

    @property
    def last(self) -> int:
        """The minibatch before which the stream ends, as far as is known."""
        return self._last

    def run_allowed(
        self, count: int, unread: int = 0, before_update: Callable[[int], None] | None = None
    ) -> None:
        """Execute what the first `count` minibatches of the run allow, but wait for no `unread`
        newest losses.

        Before each update, `before_update` is told how many minibatches of the run the weights have
        then seen.
        """
        allowed = self._allowed(count)
        self.worker.run(
            allowed if before_update is None else self._announced(allowed, before_update), unread
        )

    def drain(self, count: int | None = None) -> None:
        """Finish all minibatches in flight, of `count` so far where the stream was begun without
        its end.
        """
        rest: Iterator[Instruction] = self._stream
        if count is not None:
            # A stream that ends there begins with what was executed of the endless one: they differ
            # at the end only.
            rest = islice(self._context.stream(self.first, count), self._executed, None)
        self.worker.run(rest)

    def run_to_evaluation(self, point: int) -> None:
        """Execute until all stages have had their updates of the minibatches before `point`; others
        stay in flight.
        """
        shape = self._context.shape
        if self._messages is None:
            self._messages = MessagesUnderWay(shape, self._context.rank, self.first, self._last)
        updates = updates_between(shape, self._context.stages, self.first, self._point, point)
        self.worker.run(self._then_pause(point, updates))
        self._point = point

    def evaluate(self, minibatch: int) -> Evaluation | None:
        """Evaluate after `minibatch` minibatches; return the result on the first replica of the
        last stage.
        """
        assert self.evaluator is not None
        began_s = time.perf_counter()
        evaluation = self.evaluator.run(minibatch)
        if evaluation is not None:
            self.evaluations.append(evaluation)
        self.worker.log.paused_s += time.perf_counter() - began_s
        return evaluation

    def _then_pause(self, point: int, updates: Mapping[int, int]) -> Iterator[Instruction]:
        yield from until_updated(self._stream, updates)
        messages = self._messages
        assert messages is not None
        self.worker.links.expect(lambda: messages.before(point))

    def _ending(
        self, stream: Iterator[Instruction], ends_at: Callable[[int], bool]
    ) -> Iterator[Instruction]:
        """Yield a stream until it ends before some minibatch, and then what finishes those in
        flight.
        """
        asked = self.first  # minibatches that the stream may have
        for executed, instruction in enumerate(stream):
            while not self._allows(instruction, asked):
                if asked > self.first and ends_at(asked):
                    self._last = asked
                    yield from islice(self._context.stream(self.first, asked), executed, None)
                    return
                asked += 1
            yield instruction

    def _allowed(self, count: int) -> Iterator[Instruction]:
        while True:
            if self._next is None:
                self._next = next(self._stream)
            if not self._allows(self._next, count):
                return
            instruction = self._next
            self._next = None
            self._executed += 1
            yield instruction

    def _announced(
        self, instructions: Iterator[Instruction], before_update: Callable[[int], None]
    ) -> Iterator[Instruction]:
        for instruction in instructions:
            if isinstance(instruction, Update):
                before_update(self._minibatches_in(instruction.stage, instruction.round))
            yield instruction

    def _allows(self, instruction: Instruction, count: int) -> bool:
        match instruction:
            case AllReduce(round=round_) | AddShared(round=round_) | Update(round=round_):
                pass
            case SendShared(unit=unit) | ReceiveShared(unit=unit):
                round_ = unit.minibatch
            case _:
                return instruction.unit.minibatch < count
        return self._minibatches_in(instruction.stage, round_) <= count

    def _minibatches_in(self, stage: int, round_: int) -> int:
        """Count the minibatches of the run up to the end of a stage's round."""
        return self.first + (round_ - self.first + 1) * self._context.shape.minibatches_per_update(
            stage
        )


def make_checkpointer(context: PipelineContext, options: CheckpointOptions) -> Checkpointer:
    """Return what writes and reads checkpoints of this worker's stages; all workers call it."""
    job = replace(context.job, checkpoints=options)
    return Checkpointer(job, restorable(context), data_position(context), context.heartbeat)


def data_position(context: PipelineContext) -> DataPosition:
    """Return what checkpoints say of the data, by which other data are found.

    The first epoch's order tells: a sampler gives the others by the same rule.
    """
    data = context.data
    return DataPosition(
        context.minibatch_size,
        None if data.random or data.fed else data.minibatches(None, 1),
        samples=data.dataset_samples,
        order=data.order_digest(0),
        fed=data.fed,
    )


def restorable(context: PipelineContext) -> list[Restorable]:
    """Return what is saved and restored of this worker's stages."""
    return [
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


def save_weights(context: PipelineContext, path: Path) -> None:
    """Gather the whole model's weights on rank 0 and write them; all workers call it."""
    state = dict[str, Tensor]()
    for number, stage in context.stages.items():
        first = context.is_first_replica(number)
        # of which all replicas have parts
        if first or context.plan.stages[number].shards_gradients:
            found = whole_state(stage.module, kept=first)
            state |= found if first else {}

    context.heartbeat.enter("writing the weights", meeting=True)
    save_gathered(state if context.leads_tensor_group else {}, path)
