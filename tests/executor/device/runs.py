"""Runs of the product's own workers, whose host operations are written down; only the stages are
stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.executor.communication.control import gather_bytes
from planner.executor.communication.shared_gradients import SharedGradients
from planner.executor.run import plan_part, train
from planner.executor.run.build_context import sharding_of
from planner.executor.run.comparison import BatchComparison
from planner.executor.run.context import HeldStage, PipelineContext
from planner.executor.run.data import BatchSource
from planner.executor.stage.optimizer import StageOptimizer
from planner.formats.cluster import flat_cluster
from planner.formats.names import Backend, CodecName
from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage, config_of
from planner.model.batch import Batch, collate, make_batch
from planner.model.capture.graph import ValueSpec
from planner.model.capture.size import BATCH
from planner.model.stage.evaluation import EvaluationStages
from planner.model.tensor.dimensions import Cut
from planner.model.tensor.division import DividedWeights
from planner.options.training import DriftOptions, RunOptions, TrainingOptions
from planner.plan.rank_groups import on_ranks, plan_of_tensor_rank
from planner.schedule.instructions import Unit
from planner.schedule.registry import find
from planner.schedule.schedule import Channel, PipelineShape
from planner.workers.groups import DataGroups
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.place import CPU, Place
from tests.executor.device.rules import Recording, Work
from tests.executor.device.world import World


@dataclass(frozen=True)
class PretendedGPUs(Place):
    """Workers that send with NCCL, as far as the product can see."""

    @property
    def backend(self) -> Backend:
        return "nccl"


@dataclass(frozen=True)
class Run:
    """A run to write down."""

    schedule: str
    replicas: tuple[int, ...]  # by stage; of groups, where `degrees` has more than one rank
    microbatches: int = 1
    chunks: int = 1
    skips: tuple[tuple[int, int], ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    minibatches: int = 4
    evaluate_every: int | None = None
    traced: bool = False
    clipped: bool = False
    autocast: str | None = None
    sharded: bool = False
    compress: CodecName = "none"
    depths: tuple[int, ...] | None = field(default=None)
    # ranks of each group, by its place in the pipeline; none for single ranks
    degrees: tuple[int, ...] = ()

    def __str__(self) -> str:
        config = config_of(self.replicas, degrees=self.degree_of_stage)
        what = [f"skips {self.skips}"] * bool(self.skips) + [f"tied {self.tied}"] * bool(self.tied)
        what += (
            ["traced"] * self.traced
            + ["evaluated"] * bool(self.evaluate_every)
            + ["clipped"] * self.clipped
        )
        what += [str(self.autocast)] * bool(self.autocast) + ["sharded"] * self.sharded
        what += [self.compress] * (self.compress != "none")
        return f"{self.schedule} {config} of {self.microbatches} {' '.join(map(str, what))}".strip()

    @property
    def ranks(self) -> list[tuple[int, ...]]:
        """The ranks of each stage; a group's follow one another."""
        workers = len(self.replicas) // self.chunks
        first = list(accumulate(self.replicas[:workers], initial=0))
        schedule = find(self.schedule)
        of_workers = [tuple(range(first[w], first[w + 1])) for w in range(workers)]
        groups = [of_workers[schedule.worker_of(s, workers)] for s in range(len(self.replicas))]
        return on_ranks(groups, self.degree_of_stage)

    @property
    def degree_of_stage(self) -> tuple[int, ...]:
        """The ranks of each group, by stage."""
        workers, schedule = len(self.replicas) // self.chunks, find(self.schedule)
        degrees = self.degrees or (1,) * workers
        return tuple(degrees[schedule.worker_of(s, workers)] for s in range(len(self.replicas)))

    @property
    def shape(self) -> PipelineShape:
        return self.shape_of(self.ranks)

    def shape_of(self, ranks: Iterable[Sequence[int]]) -> PipelineShape:
        chain = [(s, s + 1) for s in range(len(self.replicas) - 1)]
        channels = tuple(Channel(*ends) for ends in (*chain, *self.skips))
        return PipelineShape(
            tuple(map(tuple, ranks)),
            channels,
            find(self.schedule),
            self.microbatches,
            self.depths,
            shared=self.tied,
        )

    @property
    def workers(self) -> int:
        return len({rank for own in self.ranks for rank in own})


class _TensorGroup:
    """Stands for `TensorGroup`, whose DTensors ask for functional collectives: posted, and waited
    for at once.
    """

    def __init__(self, degree: int, place: int) -> None:
        self.degree, self.place = degree, place

    def connect(self, group: Any, device: torch.device) -> None:
        self._group = group

    def sum(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def both_ways(self, value: Tensor) -> Tensor:
        """Sum up a value in the forward, and its gradient in the backward."""
        summed: Tensor = _Summed.apply(value, self)  # type: ignore[no-untyped-call]
        return summed


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: _TensorGroup) -> Tensor:
        ctx.group = group
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient), None


class _Stage(nn.Module):
    """One weight, and those that it shares; what it computes depends on all that it receives."""

    needs_batch, received = False, ()
    off_loss = frozenset[str]()
    statistics = frozenset[str]()

    def __init__(
        self,
        number: int,
        run: Run,
        transfers: dict[tuple[int, int], list[ValueSpec]],
        tensor: _TensorGroup | None,
    ) -> None:
        super().__init__()
        self.division = DividedWeights(tensor, {"weight": Cut(0)})  # type: ignore[arg-type]
        self.weight = nn.Parameter(torch.ones(1) + number)
        for pair in run.tied:
            if number in pair:
                self.register_parameter(_shared_name(pair), nn.Parameter(torch.ones(2)))
        self.register_buffer("seen", torch.zeros(1))
        self.sent = [
            spec for (source, _), specs in transfers.items() if source == number for spec in specs
        ]
        self.has_loss = number == len(run.replicas) - 1

    def arrange(self, parameters: object, tensors: object) -> None:
        pass

    def extent(self, batch: Batch) -> int:
        return batch.size

    def set_random_key(self, seed: int, minibatch: int, microbatch: int) -> None:
        self.unit = minibatch, microbatch

    def forward(self, batch: Batch | None, received: dict[str, Tensor]) -> dict[str, Tensor]:
        total = sum((value.sum() for value in received.values()), torch.zeros(()))
        total = total * self.weight.sum() + sum(weight.sum() for weight in self.parameters())
        if self.division.group is not None:
            total = self.division.group.both_ways(total)  # type: ignore[attr-defined]
        results = {spec.name: total.expand(spec.shape(1)) for spec in self.sent}
        return results | ({"loss": total} if self.has_loss else {})


class StandInData(BatchSource):
    def minibatch_size(self, minibatch: int) -> int:
        return self.microbatches

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        assert steps is not None
        return steps

    def batch(self, unit: Unit) -> Batch:
        raise NotImplementedError


class _Spec:
    collate = staticmethod(collate)

    def lengths(self) -> dict[str, tuple[int, int]]:
        return {}

    def example_batch(self, size: int, lengths: Mapping[str, int] | None = None) -> Batch:
        return make_batch(
            (torch.zeros(size, 256), torch.zeros(size, 256)), "a stand-in for a batch"
        )

    def optimizer(self, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(trained.values()), 1e-6)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def scheduler(self, optimizer: object) -> None:
        return None

    def defines(self, name: str) -> bool:
        return False

    def evaluation_dataset(self) -> list[Tensor]:
        return [torch.zeros(1)] * 7


class Heart(Heartbeat):
    """Notes the borders of instructions: there, too, the device may be waited for."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def begin(self, *arguments: Any, **options: Any) -> None:
        self._world.note(Work())

    def follow(self, device: object) -> None:
        """Start no thread: it would ask the simulated device beside the workers."""


Make = Callable[["Run", int, World], PipelineContext]


def record(run: Run) -> Recording:
    """Run the product's own training on every worker of `run`, and return what their hosts did."""
    return carry_out(run).recording


def carry_out(
    run: Run, seed: int | None = None, *, buffered: bool = False, make: Make | None = None
) -> World:
    """Run the product's own training on every worker of `run`, and compare what its devices have
    with the host's order.

    Args:
        seed: of the devices' order: see `Devices`.
        make: makes a worker's context; by default with stand-ins for its stages.
    """
    world = World(run.workers, seed, buffered=buffered)
    contexts = [(make or make_context)(run, rank, world) for rank in range(run.workers)]

    def work(rank: int) -> None:
        context = contexts[rank]
        train.train(context)
        world.devices.finish()
        for stage in context.stages.values():
            for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers()):
                world.devices.compare(tensor)
                world.results[rank, f"{stage.number} {name}"] = tensor.detach().clone()

    with ExitStack() as patched:
        patched.enter_context(
            patch.object(
                plan_part,
                "PeakMemory",
                lambda *_: SimpleNamespace(now_bytes=lambda: 0, forget=lambda: None),
            )
        )
        for name in ("gather_result", "gather_timeline"):
            patched.enter_context(patch.object(train, name, gather_nothing))
        world.run(work)
    return world


def gather_nothing(*_: object, **__: object) -> None:
    """Stand for the gathering of results."""
    gather_bytes(b"nothing")


def make_context(run: Run, rank: int, world: World) -> PipelineContext:
    degrees = run.degree_of_stage
    own = next(stage for stage, ranks in enumerate(run.ranks) if rank in ranks)
    place_within = run.ranks[own].index(rank) % degrees[own]
    tensor = None if degrees[own] == 1 else _TensorGroup(degrees[own], place_within)
    spec: Any = _Spec()
    transfers = {
        (c.source, c.target): [
            ValueSpec(f"from {c.source} to {c.target}", torch.float32, c.gradient, (BATCH,), (0,))
        ]
        for c in run.shape.channels
    }
    plan = Plan.model_construct(
        stages=[
            Stage.model_construct(
                layers=(str(s),),
                ranks=r,
                tensor=t,
                recompute=False,
                sharded=run.sharded and len(r) > t,
                memory=SimpleNamespace(tensor_bytes=1 << 20),
            )
            for s, (r, t) in enumerate(zip(run.ranks, degrees, strict=True))
        ],
        schedule=find(run.schedule),
        microbatches=run.microbatches,
        microbatch_size=1,
        autocast=run.autocast,
        compiled=False,
        cluster=flat_cluster(1, 1e9).model_copy(update={"compress": run.compress}),
    )
    seen = plan_of_tensor_rank(plan, place_within)
    shape = run.shape_of(stage.ranks for stage in seen.stages)
    options = TrainingOptions(
        evaluate_every=run.evaluate_every, clip_grad_norm=1.0 if run.clipped else None
    )
    job = Job.model_construct(
        model="model.py",
        plan=plan,
        steps=run.minibatches,
        options=options,
        run_options=RunOptions(trace="trace.json" if run.traced else None),
        drift=DriftOptions(drift_window=0),
    )
    shared = {pair: [_shared_name(pair)] for pair in run.tied}
    place = PretendedGPUs(CPU.compute, CPU.wire)
    held = {
        number: _held(number, run, (transfers, shared), seen.stages[number], rank, tensor)
        for number in shape.stages_of(rank)
    }
    evaluation = None
    if run.evaluate_every is not None:
        modules: Any = {number: _Stage(number, run, transfers, tensor) for number in held}
        evaluation = EvaluationStages(
            modules, transfers, len(shape.ranks) - 1, lambda known, batch: None, None, None
        )
    return PipelineContext(
        job=job,
        spec=spec,
        place=place,
        rank=rank,
        heartbeat=Heart(world),
        data=StandInData(run.microbatches),
        comparison=BatchComparison(rank),
        facts=(),
        minibatches=run.minibatches,
        groups=DataGroups(place, timedelta(0)),
        shape=shape,
        tensor=tensor,  # type: ignore[arg-type]
        stages=held,
        transfers=transfers,
        evaluation=evaluation,
    )


def _held(
    number: int,
    run: Run,
    exchanged: tuple[Any, dict[Any, list[str]]],
    planned: Stage,
    rank: int,
    tensor: _TensorGroup | None,
) -> HeldStage:
    transfers, names = exchanged
    module: Any = _Stage(number, run, transfers, tensor)
    shared = SharedGradients(number, module, names)
    spec: Any = _Spec()
    optimizer = StageOptimizer(
        spec,
        module,
        clip_grad_norm=1.0 if run.clipped else None,
        scale_loss=run.autocast == "float16",
        sharding=sharding_of(planned, module, shared, rank, CPU.wire),
    )
    return HeldStage(number, module, optimizer, shared)


def _shared_name(pair: tuple[int, int]) -> str:
    return f"shared_{pair[0]}_{pair[1]}"
