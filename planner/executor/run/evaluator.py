"""Evaluate between updates: the evaluation data passes forward through the pipeline, with the
newest weights.

Every stage stops after its update of the same minibatch, and units in flight stay in flight. So
under asynchronous schedules a stage has sent what the next one takes only after the evaluation.
Over NCCL such a send may stay on the sender's device until the receiver posts. If the sender's host
then waits for its device, it sends no evaluation data, and the receiver waits for these. So the
receiver posts what is under way before it evaluates: see `MessagesUnderWay`.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.executor.communication.control import gather_bytes
from planner.executor.communication.links import Ahead, LinkGroups, Links
from planner.executor.communication.messages import Layouts
from planner.executor.communication.nccl_links import links_over
from planner.executor.run.comparison import FIRST
from planner.executor.run.context import PipelineContext
from planner.executor.run.data import EvaluationBatches, EvaluationData, Extents
from planner.executor.run.newest_copies import NewestCopies
from planner.executor.run.sample_checks import ItemChecks
from planner.executor.run.sample_reader import EVALUATION
from planner.formats.files import replace
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.buffers import buffers_kept
from planner.model.capture.graph import LOSS
from planner.model.generators import seeded
from planner.model.loss import check_labels, weight_function
from planner.model.options import autocasting
from planner.model.stage.evaluation import separate_buffers, share_buffers
from planner.runtime import runtime_of
from planner.schedule import instructions as do
from planner.schedule.derived import evaluation_stream, group_size, segment_stream
from planner.schedule.instructions import POSTED, Instruction, Receive, Send, Unit
from planner.schedule.schedule import Channel, PipelineShape
from planner.workers.job import Evaluation


class MessagesUnderWay:
    """Follows all workers' streams of minibatches `first` to before `last`, from one evaluation to
    the next.
    """

    def __init__(self, shape: PipelineShape, rank: int, first: int, last: int) -> None:
        self._shape = shape
        self._rank = rank
        self._first = first
        self._point = first
        self._streams = {
            r: segment_stream(shape, stage, r, first, last)
            for r, stage in shape.first_stages.items()
        }
        self._sent: dict[Receive, None] = {}  # in the order of sending, and not yet taken

    def before(self, point: int) -> list[Receive]:
        """Return what the worker has yet to take of what is sent before the evaluation after
        minibatch `point`.
        """
        taken = []
        for rank, stream in self._streams.items():
            updates = updates_between(
                self._shape, self._shape.stages_of(rank), self._first, self._point, point
            )
            for instruction in until_updated(stream, updates):
                if isinstance(instruction, Send) and instruction.peer_rank == self._rank != rank:
                    self._sent[do.matching_receive(instruction, rank)] = None
                elif isinstance(instruction, Receive) and rank == self._rank:
                    taken.append(instruction)

        for receive in taken:
            self._sent.pop(receive, None)
        self._point = point
        return list(self._sent)


_WEIGHT = "loss weight"  # among the sums: what the losses are means over


class Evaluator:
    """One worker's part of the evaluations of a run; all workers make one together, because it
    makes process groups.

    Args:
        replicas: by stage, the process group of this worker's replicated stages.
        links: of training. Over NCCL evaluation sends on its lanes, too: all before has been posted
            by both workers.
    """

    def __init__(
        self,
        context: PipelineContext,
        replicas: Mapping[int, dist.ProcessGroup],
        links: LinkGroups,
        data: EvaluationData | None = None,
    ) -> None:
        assert context.evaluation is not None
        self._context = context
        self._stages = context.evaluation
        self._replicas = replicas
        self._newest = NewestCopies(context)
        plan = context.job.plan
        # Whether the ranks of a group see different samples, or tokens, and so have other buffers.
        self._ranks_differ = plan.by_samples or plan.divides_sequences
        for number, module in self._stages.modules.items():
            module.to(context.place.compute)
            if self._has_saved_buffers(number):
                # Moving a module may replace its buffers, which cuts the tie to those of training.
                share_buffers(module, context.stages[number].module)
            elif not self._runs_blocks:
                separate_buffers(module)

        fixed = self._stages.batch_size
        self._data = data or _evaluation_batches(context, fixed)
        self._items = None
        if isinstance(self._data, EvaluationBatches):
            self._items = ItemChecks(self._data.reader, context.comparison)
        self._extents = None
        if lengths := self._stages.lengths:
            self._extents = Extents(self._data.batch, self._data.size, lengths, POSTED + 1)
        self._weight = weight_function(context.loss or LossMean(over="samples"), context.spec)

        channels = tuple(
            Channel(source, target, gradient=False)
            for source, target in sorted(self._stages.transfers)
        )
        self._shape = replace(context.shape, channels=channels)
        self._turn = 0  # of this evaluation among all: there may be several after one minibatch
        self._links = self._make_links(links, fixed or context.microbatch_size)

    def _make_links(self, training: LinkGroups, samples: int) -> Links:
        """Return the links of evaluations, with buffers for batches of so many samples."""
        context = self._context
        extent_of = self._data.size if self._extents is None else self._extents.of
        longest = tuple(length.most for length in self._stages.lengths)
        layouts = Layouts(self._stages.transfers, {}, extent_of, longest, with_scale=False)

        # Long enough that each replica exchanges messages with all that it ever does.
        batches = math.lcm(*self._shape.replicas)
        streams = {
            rank: evaluation_stream(shape, rank, batches)
            for shape in reversed(context.shapes_of_tensor_ranks(self._shape))
            for rank in shape.first_stages
        }
        groups = LinkGroups(context.groups, streams, context.receivers, training)
        most = 2 * group_size(self._shape)
        links = links_over(context.place)(groups, layouts.layout, most, context.place)
        links.reserve(layouts, samples)
        return links

    def run(self, minibatch: int) -> Evaluation | None:
        """Evaluate after `minibatch` minibatches; return the result on the first replica of the
        last stage.
        """
        self._turn += 1
        with self._training_kept():
            totals = self._run(minibatch)
        return self._merge(minibatch, totals)

    def _run(self, minibatch: int) -> Counter[str]:
        """Follow the evaluation's stream; return the sums of this worker's batches."""
        self._prepare()

        compute = self._context.place.compute
        stream = Ahead(evaluation_stream(self._shape, self._context.rank, len(self._data.sizes)))
        self._links.follow(stream)
        # Random numbers that the evaluation draws must not change those of training.
        with self._newest.lent():
            with torch.no_grad(), runtime_of(compute).random_state_kept(compute):
                totals, ran = self._follow(stream, minibatch)
            self._even_out(ran)

        self._links.drain()
        self._links.follow(Ahead())  # training needs the memory of the buffers that are left
        return totals

    @property
    def _runs_blocks(self) -> bool:
        """Whether stages in training and in evaluation run the user's own modules, whose buffers
        they share.
        """
        return self._context.spec.defines("blocks")

    def _has_saved_buffers(self, number: int) -> bool:
        """Return whether this worker's buffers of a stage are those that are saved."""
        first = self._context.is_first_replica(number)
        return first and (self._context.leads_tensor_group or not self._ranks_differ)

    @contextmanager
    def _training_kept(self) -> Iterator[None]:
        """Restore the buffers of stages in training that evaluate with those of another worker."""
        with ExitStack() as kept:
            for number in self._stages.modules:
                if self._runs_blocks and not self._has_saved_buffers(number):
                    kept.enter_context(buffers_kept(self._context.stages[number].module))
            yield

    def _prepare(self) -> None:
        """Check that all workers see the same data and buffers, before anybody runs a batch."""
        if self._extents is not None:
            self._extents.forget()
        self._context.heartbeat.enter("preparing to evaluate", meeting=True)
        if self._items is not None and any(map(self._reads, self._context.stages)):
            self._items.check(self._turn, EVALUATION, self._turn % sum(self._data.sizes))

        # The first replica's buffers, such as BatchNorm's statistics, are those that are saved.
        for number, module in self._stages.modules.items():
            buffers = [buffer for _, buffer in sorted(module.named_buffers())]
            for source, group in self._ways_from_first(number):
                for buffer in buffers:
                    dist.broadcast(buffer, source, group)

    def _ways_from_first(self, number: int) -> Iterator[tuple[int, dist.ProcessGroup]]:
        """Yield the rank and the group of each broadcast on the way of what the first worker of a
        stage has to this one.
        """
        if number in self._replicas:
            yield self._shape.ranks[number][0], self._replicas[number]
        context = self._context
        if self._ranks_differ and context.tensor is not None:
            leader = context.job.plan.stages[number].group_of(context.rank)[0]
            yield leader, context.tensor.mesh.get_group()

    def _follow(self, stream: Ahead, minibatch: int) -> tuple[Counter[str], int]:
        """Execute the instructions; return the sums of this worker's batches, and how many it ran
        in all of its stages.
        """
        totals: Counter[str] = Counter()
        ran = 0
        known: dict[tuple[int, Unit], dict[str, Tensor]] = {}  # that a stage has received or made
        for instruction in stream:
            assert isinstance(instruction, (do.ReceiveActivation, do.Forward, do.SendActivation))
            self._context.heartbeat.begin(instruction, evaluating=True)
            values = known.setdefault((instruction.stage, instruction.unit), {})
            match instruction:
                case do.ReceiveActivation():
                    values.update(self._links.receive(instruction))
                case do.Forward(stage=stage, unit=unit):
                    ran += 1
                    # The values of the unit before have been sent: free them.
                    for key in [key for key in known if key != (stage, unit) and key[0] == stage]:
                        del known[key]
                    totals.update(self._forward(stage, unit, values, minibatch))
                case do.SendActivation(stage=stage, peer_stage=target):
                    names = [spec.name for spec in self._stages.transfers[stage, target]]
                    self._links.send(instruction, {name: values[name] for name in names})

        return totals, ran

    def _forward(
        self, stage: int, unit: Unit, values: dict[str, Tensor], minibatch: int
    ) -> dict[str, Any]:
        """Run a stage's layers on a batch, add what they make to its `values`, and return what the
        last stage sums up.
        """
        batch = None
        if self._reads(stage):
            batch = self._read(minibatch, unit)
        layers = self._stages.modules.get(stage)
        if layers is None:  # all of the stage's layers are for training only
            return {}

        results = layers(batch, values)
        values.update(results)
        if LOSS not in results:
            return {}
        return self._sums(unit, batch, results[LOSS], values)

    def _reads(self, stage: int) -> bool:
        """Return whether a stage of this worker reads batches: for its layers, its loss or
        metrics.
        """
        layers = self._stages.modules.get(stage)
        measures = stage == self._stages.last and self._context.spec.defines("metrics")
        return measures or (layers is not None and self._context.reads_batches(layers))

    def _read(self, minibatch: int, unit: Unit) -> Batch:
        """Return a batch of the evaluation after `minibatch`; the first ones are compared with what
        others read.
        """
        if self._extents is None:
            batch = self._data.batch(unit)
        else:
            batch = self._extents.batch(unit)
        if unit.minibatch < FIRST:
            what = f"batch {unit.minibatch} of the evaluation after minibatch {minibatch}"
            self._context.comparison.check(what, batch, self._turn)
        return batch.to(self._context.place.compute)

    def _even_out(self, ran: int) -> None:
        """Run as many batches as the replica with most of them, where all gather the weights for
        each.
        """
        gathers = self._context.plan.stages[0].shards_gradients
        sharding = None
        if gathers:
            sharding = self._context.stages[0].optimizer.sharding
        if sharding is None:
            return
        compute = self._context.place.compute
        with torch.no_grad(), runtime_of(compute).random_state_kept(compute):
            for _ in range(-(-len(self._data.sizes) // self._shape.replicas[0]) - ran):
                self._stages.modules[0](self._data.batch(Unit(0)).to(compute), {})

        sharding.part_with_weights()

    def _sums(
        self, unit: Unit, batch: Batch | None, loss: Tensor, known: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the loss of a batch and the metrics, each times what it is a mean over, and the
        loss' weight.
        """
        samples = self._data.size(unit)
        if batch is not None:
            check_labels(batch, self._context.loss, self._context.spec.origin)
        weight = samples if batch is None else self._weight(batch)
        # A mean over nothing is not a number, and counts nothing.
        found = {"loss": float(loss) * weight if weight else 0.0, _WEIGHT: weight}
        if self._context.spec.defines("metrics"):
            assert batch is not None
            with autocasting(self._context.place.compute.type, self._stages.autocast):
                metrics = self._context.spec.metrics(
                    self._stages.output(known, batch), batch.target
                )
            found |= {name: value * samples for name, value in metrics.items()}

        return found

    def _merge(self, minibatch: int, totals: Mapping[str, float]) -> Evaluation | None:
        """Return the result on the first replica of the last stage; None on all others."""
        ranks = self._shape.ranks[self._stages.last]
        parts = []
        if self._context.rank in ranks:
            parts = gather_bytes(json.dumps(totals).encode(), ranks=ranks)
        if not parts or not self._context.leads_tensor_group:
            return None

        sums: Counter[str] = Counter()
        for part in parts:
            sums.update(json.loads(part))
        counted = sums.pop(_WEIGHT)
        loss = None
        if counted:
            loss = _finite(sums.pop("loss") / counted)

        samples = sum(self._data.sizes)
        means = {name: _finite(value / samples) for name, value in sums.items()}
        return Evaluation(minibatch=minibatch, samples=samples, loss=loss, metrics=means)


def _evaluation_batches(context: PipelineContext, fixed: int | None) -> EvaluationBatches:
    """Return the batches of evaluation_dataset(), of as many samples as stages take."""
    seed = context.job.seed
    # The same seed as for dataset(), so that a random split in both divides the samples alike.
    with seeded(seed):
        dataset = context.spec.evaluation_dataset()
    return EvaluationBatches(
        dataset,
        fixed or context.microbatch_size,
        drop_last=fixed is not None,
        collate=context.spec.collate,
        seed=seed,
        draws_on=context.place.compute,
    )


def evaluation_points(
    shape: PipelineShape, first: int, last: int, every: int, *, at_end: bool = False
) -> list[int]:
    """Return the minibatches after which to evaluate, between `first` (exclusive) and `last`.

    They are the multiples of `every`, moved on to where all stages end a round; `at_end`, `last` as
    well.
    """
    period = math.lcm(*(shape.minibatches_per_update(stage) for stage in range(len(shape.ranks))))
    due = range((first // every + 1) * every, last + 1, every)
    points = {min(last, first + -(-(minibatch - first) // period) * period) for minibatch in due}
    return sorted(points | {last} if at_end else points)


def updates_between(
    shape: PipelineShape, stages: Iterable[int], first: int, start: int, end: int
) -> dict[int, int]:
    """Count by stage the updates from minibatch `start` to `end`, in a stream that began with
    minibatch `first`.
    """

    def until(minibatch: int, stage: int) -> int:
        return -(-(minibatch - first) // shape.minibatches_per_update(stage))

    return {stage: until(end, stage) - until(start, stage) for stage in stages}


def until_updated(
    instructions: Iterator[Instruction], updates: Mapping[int, int]
) -> Iterator[Instruction]:
    """Yield from `instructions` until each of a worker's stages has had so many more updates."""
    left = dict(updates)
    while max(left.values(), default=0) > 0:
        instruction = next(instructions, None)
        if instruction is None:  # the stream has ended before
            return
        yield instruction
        if isinstance(instruction, do.Update):
            left[instruction.stage] -= 1


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
