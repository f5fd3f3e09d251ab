"""Evaluation between updates: the evaluation data passes forward through the pipeline, with the weights of that moment.

Every stage stops after its update of the same minibatch, so all evaluate what has seen the same data; the stages'
streams go on afterwards as if nothing had been: what is between forward and backward stays so, and no weight is used
for another minibatch than without evaluation. Messages have process groups of their own, because receives of training
are posted ahead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from planner.executor.communication.collect import gather_bytes
from planner.executor.communication.layouts import Layouts
from planner.executor.communication.links import LinkGroups, Links, SendLimits
from planner.executor.health.heartbeat import Heartbeat
from planner.executor.job import Evaluation
from planner.executor.run.data import EvaluationBatches
from planner.executor.run.setup import Place
from planner.model.autocast import autocasting
from planner.model.batch import Batch
from planner.model.spec import TrainingSpec
from planner.model.stage.evaluation import EvaluationStages
from planner.model.stage.stage import StageModule
from planner.schedule.instructions import (
    Forward,
    Instruction,
    ReceiveActivation,
    SendActivation,
    Unit,
    Update,
)
from planner.schedule.parts.evaluation import evaluation_stream, group_size
from planner.schedule.schedule import Channel, PipelineShape

NewGroup = Callable[[Iterable[int] | None], dist.ProcessGroup]


@dataclass(frozen=True)
class ReplicatedBuffers:
    """Buffers of a replicated stage in evaluation, such as BatchNorm's statistics, of which each replica has its own.

    All evaluate with those of the first replica: they are what is saved, so the result is that of the saved model.

    Args:
        module: the stage in evaluation; on the first replica with training's buffers, elsewhere with others.
        first: rank of the first replica.
        group: the replicas.
    """

    module: StageModule
    first: int
    group: dist.ProcessGroup

    def fetch(self) -> None:
        """Take over the first replica's; all replicas call it."""
        for _, buffer in sorted(self.module.named_buffers()):
            dist.broadcast(buffer, self.first, self.group)


class Evaluator:
    """One worker's part of the evaluations of a run.

    Args:
        stages: of the evaluation graph, those of this worker among them.
        spec: for metrics(output, target).
        data: what to evaluate on.
        shape: of training's pipeline.
        rank: this worker's.
        place: where it computes.
        new_group: makes a process group; all workers make an evaluator at the same time.
        heartbeat: where the worker tells what it does.
        buffers: of this worker's replicated stages.
    """

    def __init__(
        self,
        stages: EvaluationStages,
        spec: TrainingSpec,
        data: EvaluationBatches,
        shape: PipelineShape,
        rank: int,
        place: Place,
        new_group: NewGroup,
        heartbeat: Heartbeat,
        buffers: Sequence[ReplicatedBuffers] = (),
    ) -> None:
        self._stages = stages
        self._spec = spec
        self._data = data
        self._rank = rank
        self._heartbeat = heartbeat
        self._buffers = buffers
        self._place = place
        channels = tuple(Channel(source, target, gradient=False) for source, target in sorted(stages.transfers))
        self._shape = replace(shape, channels=channels)
        self._groups = LinkGroups.create(self._shape, new_group, tags=place.backend == "gloo")
        self._last_ranks = shape.ranks[stages.last]
        self._last_group = new_group(self._last_ranks)
        self._layouts = Layouts(stages.transfers, {}, data.size, with_scale=False)
        self.done: list[Evaluation] = []  # on the first replica of the last stage

    @property
    def reports(self) -> bool:
        """Whether this worker gets the results."""
        return self._rank == self._last_ranks[0]

    def run(self, minibatch: int) -> Evaluation | None:
        """Evaluate after `minibatch` minibatches; the result on the worker that `reports`."""
        totals: dict[str, float] = {}
        self._heartbeat.enter("preparing to evaluate", meeting=True)
        for buffers in self._buffers:
            buffers.fetch()
        with torch.no_grad(), torch.random.fork_rng(devices=self._cuda_devices()):
            for unit, batch, results, known in self._forwards():
                if "loss" in results:
                    self._add(totals, unit, batch, results["loss"], known)
        return self._merge(minibatch, totals)

    def _forwards(self) -> Iterator[tuple[Unit, Batch | None, Mapping[str, Tensor], Mapping[str, Tensor]]]:
        """Run this worker's stream; yields what each forward took and returned, and all values known at its stage."""
        links = Links(
            self._groups,
            lambda: evaluation_stream(self._shape, self._rank, self._data.batches),
            self._layouts.of,
            SendLimits(2 * group_size(self._shape)),
            self._place,
        )
        known: dict[tuple[int, Unit], dict[str, Tensor]] = {}
        for instruction in evaluation_stream(self._shape, self._rank, self._data.batches):
            assert isinstance(instruction, (ReceiveActivation, Forward, SendActivation))
            self._heartbeat.begin(instruction, evaluating=True)
            values = known.setdefault((instruction.stage, instruction.unit), {})
            match instruction:
                case ReceiveActivation():
                    values.update(links.receive(instruction))
                case Forward(stage=stage, unit=unit):
                    # The one before is sent: its values are not needed any more.
                    for key in [key for key in known if key != (stage, unit) and key[0] == stage]:
                        del known[key]
                    batch = self._batch(stage, unit)
                    results = self._forward(stage, batch, values)
                    values.update(results)
                    yield unit, batch, results, values
                case SendActivation(stage=stage, peer_stage=target):
                    names = [spec.name for spec in self._stages.transfers[stage, target]]
                    links.send(instruction, {name: values[name] for name in names})
        links.drain()

    def _batch(self, stage: int, unit: Unit) -> Batch | None:
        """The samples, where the stage's layers or metrics(output, target) read them."""
        module = self._stages.modules.get(stage)
        needed = (module is not None and module.needs_batch) or (
            stage == self._stages.last and self._spec.defines("metrics")
        )
        return self._data.batch(unit).to(self._place.compute) if needed else None

    def _forward(self, stage: int, batch: Batch | None, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        module = self._stages.modules.get(stage)
        if module is None:  # all its layers are for training only
            return {}
        results: dict[str, Tensor] = module(batch, values)
        return results

    def _add(
        self, totals: dict[str, float], unit: Unit, batch: Batch | None, loss: Tensor, known: Mapping[str, Tensor]
    ) -> None:
        samples = self._data.size(unit)
        found = {"loss": float(loss)}
        if self._spec.defines("metrics"):
            assert batch is not None
            with autocasting(self._place.compute.type, self._stages.autocast):
                found |= self._spec.metrics(self._stages.output(known, batch), batch.target)
        for name, value in found.items():
            totals[name] = totals.get(name, 0.0) + value * samples

    def _merge(self, minibatch: int, totals: dict[str, float]) -> Evaluation | None:
        """Add up what the last stage's replicas have."""
        if self._rank not in self._last_ranks:
            return None
        content = json.dumps(totals).encode()
        parts = gather_bytes(content, self._place.wire, self._last_group, self._last_ranks)
        if not parts:
            return None
        sums: dict[str, float] = {}
        for part in parts:
            for name, value in json.loads(part).items():
                sums[name] = sums.get(name, 0.0) + value
        means = {name: _finite(value / self._data.samples) for name, value in sums.items()}
        evaluation = Evaluation(minibatch=minibatch, samples=self._data.samples, loss=means.pop("loss"), metrics=means)
        self.done.append(evaluation)
        return evaluation

    def _cuda_devices(self) -> list[torch.device]:
        return [self._place.compute] if self._place.compute.type == "cuda" else []


def evaluation_points(shape: PipelineShape, first: int, last: int, every: int) -> list[int]:
    """Minibatches after which to evaluate between `first` (exclusive) and `last`, where the pipeline is drained.

    Every `every` minibatches of the run, or as soon after as all stages end a round at once; and at `last`.
    """
    period = math.lcm(*(shape.minibatches_per_update(stage) for stage in range(len(shape.ranks))))
    due = range((first // every + 1) * every, last + 1, every)
    return sorted({min(last, first + -(-(minibatch - first) // period) * period) for minibatch in due})


def until_updated(instructions: Iterator[Instruction], updates: Mapping[int, int]) -> Iterator[Instruction]:
    """Pass `instructions` on until each of a worker's stages has had so many more updates."""
    left = {stage: count for stage, count in updates.items() if count}
    while left:
        instruction = next(instructions)
        yield instruction
        if isinstance(instruction, Update):
            left[instruction.stage] -= 1
            if not left[instruction.stage]:
                del left[instruction.stage]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
