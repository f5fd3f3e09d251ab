"""What a worker needs before it trains: one frozen record that every later builder takes whole.

`planner.executor.run.build_context` makes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch

from planner.executor.communication.links import Receivers
from planner.executor.communication.shared_gradients import SharedGradients
from planner.executor.run.comparison import BatchComparison, Fact
from planner.executor.run.data import BatchSource
from planner.executor.run.loss_check import LossCheck
from planner.executor.run.reading_ahead import AHEAD
from planner.executor.run.state_watch import StateWatch
from planner.executor.stage.optimizer import StageOptimizer
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import LossMean
from planner.model.capture.graph import ValueSpec
from planner.model.lengths import Length, Varying, varying
from planner.model.loss import looks_at_batches
from planner.model.spec import TrainingSpec
from planner.model.stage.evaluation import EvaluationStages
from planner.model.stage.stage import StageModule, warm_up
from planner.plan.rank_groups import plan_of_tensor_rank, receivers, sample_parts
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
    facts: Sequence[Fact]  # that all workers must have alike before they train
    minibatches: int  # of the whole run
    groups: DataGroups
    shape: PipelineShape
    tensor: "TensorGroup | None" = None  # the ranks that divide this worker's layers with it
    # of this worker, by number: one, or several chunks; none where the plan leaves the worker out
    stages: Mapping[int, HeldStage]
    # with which such a worker measures its device: see `planner.executor.run.left_out`
    measured: StageModule | None = None
    # by (source, target) stage, to and from this worker's
    transfers: Mapping[tuple[int, int], Sequence[ValueSpec]]
    # the same stages of the evaluation graph, if the job evaluates
    evaluation: EvaluationStages | None
    lengths: Sequence[Length] = ()  # of batches, that vary
    deferred: bool = False  # whether the weights of other stages were never made
    loss: LossMean | None = None  # what the loss is a mean over; None stands for the samples
    loss_check: LossCheck | None = None  # of the last stage, if this worker has it
    state_watch: StateWatch | None = None  # of what loss() and forward() read

    @cached_property
    def plan(self) -> Plan:
        """The plan of the job, as this rank sees it in its tensor-parallel group: see
        `plan_of_tensor_rank`.
        """
        return plan_of_tensor_rank(self.job.plan, 0 if self.tensor is None else self.tensor.place)

    @property
    def leads_tensor_group(self) -> bool:
        """Whether this worker reports and saves what all ranks of its group have alike."""
        return self.tensor is None or self.tensor.place == 0

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch."""
        assert self.plan.microbatch_size is not None  # or making the context had failed
        return self.plan.microbatch_size

    @property
    def minibatch_size(self) -> int:
        return self.microbatch_size * sample_parts(self.job.plan) * self.data.microbatches

    @property
    def sizes(self) -> set[int]:
        """Sizes of all microbatches that have samples."""
        return {self.microbatch_size, *filter(None, self.data.last_sizes)}

    def reads_batches(self, module: StageModule) -> bool:
        """Return whether a stage reads batches: for its layers, or for what its loss is a
        mean over, which earlier stages may have sent to its layers.
        """
        return module.needs_batch or (module.has_loss and looks_at_batches(self.loss))

    def lengths_of(self, unit: Unit) -> dict[str, int]:
        """Return the lengths of a microbatch by their names in lengths(); none where these do not
        vary.
        """
        extent = self.data.extent(unit)
        if isinstance(extent, int) or self._varying is None:
            return {}
        sizes = {
            (each.leaf, each.dimension): size
            for each, size in zip(self.lengths, extent[1:], strict=True)
        }
        return dict(zip(self.spec.lengths(), self._varying.by_name(sizes), strict=True))

    @cached_property
    def _varying(self) -> Varying | None:
        return varying(self.spec, 2)

    def await_models(self) -> None:
        """Wait until all workers have built their models, before the first operation that has a
        time-out.
        """
        self.heartbeat.enter("waiting for the others to build their models", meeting=True)
        await_all("models")

    def connect(self) -> None:
        """Use every process group once, and take memory; all workers call it, with nothing under
        way.

        A device's memory that the allocator does not have yet, pinned memory, and kernels at their
        first use may wait for the whole device, and so for messages that other workers' hosts have
        yet to post.
        """
        self.heartbeat.enter("waiting for the others to be ready", meeting=True)
        await_all("ready")  # one may have read a large checkpoint
        self.heartbeat.enter("connecting to the other workers", meeting=True)
        self.groups.use_once()
        self.comparison.begin()
        for fact in self.facts:
            self.comparison.compare(fact)
        self.heartbeat.enter("taking memory", meeting=True)
        compute = self.place.compute
        runtime = runtime_of(self.place.compute)
        if not runtime.asynchronous or not self.stages:
            return
        tensors_bytes = int(self.plan.tensor_bytes(min(self.stages)) * _RESERVED)
        # The allocator still has what the stages took when they ran once.
        # the streams of fully_shard take memory of their own
        if not self.plan.stages[0].shards_gradients:
            runtime.reserve(compute, max(0, tensors_bytes - runtime.peak_bytes(compute)))
        copies = LEAD + AHEAD + max(map(self.shape.in_flight, self.stages))
        for size in self.sizes:
            batch = self.spec.example_batch(size)
            # the allocator of pinned memory keeps it, too
            held = [batch.pinned(compute) for _ in range(copies)]
            del held

        # Others were run before; these run together.
        if self.tensor is not None or self.plan.stages[0].shards_gradients:
            self.run_once((stage.module for stage in self.stages.values()), self.sizes)
        if self.evaluation is not None:
            with torch.no_grad():
                self.run_once(
                    self.evaluation.modules.values(),
                    [self.evaluation.batch_size or self.microbatch_size],
                )

    def run_once(self, modules: Iterable[StageModule], sizes: Iterable[int]) -> None:
        """Run stages on batches of `sizes` samples, the shortest and the longest, and leave no
        trace of it.
        """
        compute = self.place.compute
        with runtime_of(compute).random_state_kept(compute):
            between = self.spec.lengths().items()
            extremes = [
                {name: pair[end] for name, pair in between}
                for end in (range(2) if between else range(1))
            ]
            made = (
                self.spec.example_batch(size, lengths) for size, lengths in product(sizes, extremes)
            )
            batches = [batch.to(compute) for batch in made]
            for module, batch in product(modules, batches):
                warm_up(module, batch)

    def stream(self, first: int, last: int) -> Iterator[Instruction]:
        """Yield this worker's instructions for minibatches `first` to `last` (exclusive), from an
        empty pipeline; none where the plan leaves it out.
        """
        if not self.stages:
            return iter(())
        return segment_stream(self.shape, min(self.stages), self.rank, first, last)

    def shapes_of_tensor_ranks(self, shape: PipelineShape) -> list[PipelineShape]:
        """Return a shape for each place in the tensor-parallel groups; a rank's own is the first
        that has the rank.
        """
        plans = (
            plan_of_tensor_rank(self.job.plan, place)
            for place in range(self.job.plan.ranks_per_replica)
        )
        return [replace(shape, ranks=tuple(stage.ranks for stage in plan.stages)) for plan in plans]

    @property
    def receivers(self) -> Receivers | None:
        """Who takes what a rank sends: ranks of the other stage's group; None where all groups have
        one size.
        """
        plan = self.job.plan
        if plan.divides_alike:
            return None
        return lambda rank, send: receivers(plan, send.stage, rank, send.peer_stage, send.peer_rank)

    def segments(self, first: int) -> Iterator[tuple[int, int]]:
        """Return the parts of the run from minibatch `first` on, between which the pipeline runs
        empty.
        """
        elastic = self.job.elastic
        copies = None
        if elastic.elastic is not None:
            copies = elastic.copy_every
        return segments(first, self.minibatches, self.job.checkpoints.checkpoint_every, copies)

    def is_first_replica(self, stage: int) -> bool:
        """Return whether this worker, or its tensor-parallel group, is the first replica of
        `stage`.
        """
        return self.rank == self.plan.stages[stage].ranks[0]
