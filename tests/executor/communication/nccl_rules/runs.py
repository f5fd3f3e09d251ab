"""Runs of the product's own workers, whose host operations are written down; only the stages are stand-ins."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from planner.devices.groups import DataGroups
from planner.devices.place import CPU, Place
from planner.executor.communication.collect import gather_bytes
from planner.executor.communication.shared import SharedGradients, shared_parameters
from planner.executor.health.heartbeat import Heartbeat
from planner.executor.job import Job, RunOptions, TrainingOptions
from planner.executor.run import train
from planner.executor.run.context import HeldStage, PipelineContext, sharding_of
from planner.executor.run.data import BatchSource
from planner.executor.stage.optimizer import StageOptimizer
from planner.formats.cluster import flat_cluster
from planner.formats.codecs import CodecName
from planner.formats.device_names import Backend
from planner.formats.plan import Plan
from planner.formats.plan_parts import Stage
from planner.model.batch import Batch
from planner.model.capture.graph import ValueSpec
from planner.model.capture.size import BATCH
from planner.model.stage.evaluation import EvaluationStages
from planner.schedule.instructions import Unit
from planner.schedule.registry import find
from planner.schedule.schedule import Channel, PipelineShape
from tests.executor.communication.nccl_rules.rules import Recording, Work
from tests.executor.communication.nccl_rules.world import World


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
    replicas: tuple[int, ...]
    microbatches: int = 1
    chunks: int = 1
    skips: tuple[tuple[int, int], ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    minibatches: int = 4
    evaluate_every: int | None = None
    traced: bool = False
    accumulate: int = 1
    clipped: bool = False
    autocast: str | None = None
    sharded: bool = False
    compress: CodecName = "none"
    depths: tuple[int, ...] | None = field(default=None)

    def __str__(self) -> str:
        config = "-".join(map(str, self.replicas))
        what = [f"skips {self.skips}"] * bool(self.skips) + [f"tied {self.tied}"] * bool(self.tied)
        what += ["traced"] * self.traced + ["evaluated"] * bool(self.evaluate_every) + ["clipped"] * self.clipped
        what += [f"accumulate {self.accumulate}"] * (self.accumulate > 1) + [str(self.autocast)] * bool(self.autocast)
        what += ["sharded"] * self.sharded + [self.compress] * (self.compress != "none")
        return f"{self.schedule} {config} of {self.microbatches} {' '.join(map(str, what))}".strip()

    @property
    def shape(self) -> PipelineShape:
        workers = len(self.replicas) // self.chunks
        first = list(accumulate(self.replicas[:workers], initial=0))
        schedule = find(self.schedule)
        of_workers = [tuple(range(first[w], first[w + 1])) for w in range(workers)]
        ranks = tuple(of_workers[schedule.worker_of(s, workers)] for s in range(len(self.replicas)))
        chain = [(s, s + 1) for s in range(len(ranks) - 1)]
        channels = tuple(Channel(*ends) for ends in (*chain, *self.skips))
        return PipelineShape(
            ranks, channels, schedule, self.microbatches, self.depths, accumulate=self.accumulate, shared=self.tied
        )

    @property
    def workers(self) -> int:
        return len(self.shape.first_stages)


class _Stage(nn.Module):
    """One weight, and those that it shares; what it computes depends on all that it receives."""

    needs_batch, deferred_norms = False, ()

    def __init__(self, number: int, run: Run, transfers: dict[tuple[int, int], list[ValueSpec]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1) + number)
        for pair in run.tied:
            if number in pair:
                self.register_parameter(_shared_name(pair), nn.Parameter(torch.ones(2)))
        self.register_buffer("seen", torch.zeros(1))
        self.sent = [spec for (source, _), specs in transfers.items() if source == number for spec in specs]
        self.has_loss = number == len(run.replicas) - 1

    def arrange(self, parameters: object, tensors: object) -> None:
        pass

    def set_random_key(self, seed: int, minibatch: int, microbatch: int) -> None:
        self.unit = minibatch, microbatch

    def forward(self, batch: Batch | None, received: dict[str, Tensor]) -> dict[str, Tensor]:
        total = sum((value.sum() for value in received.values()), torch.zeros(()))
        total = total * self.weight.sum() + sum(weight.sum() for weight in self.parameters())
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
    def optimizer(self, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(trained.values()), 1e-6)

    def scheduler(self, optimizer: object) -> None:
        return None

    def defines(self, name: str) -> bool:
        return False

    def evaluation_dataset(self) -> list[Tensor]:
        return [torch.zeros(1)] * 7


class _Heartbeat(Heartbeat):
    """Notes the borders of instructions: there, too, the device may be waited for."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def begin(self, *arguments: Any, **options: Any) -> None:
        self._world.note(Work())


def record(run: Run) -> Recording:
    """Run the product's own training on every worker of `run`, and return what their hosts did."""
    world = World(run.workers)
    with ExitStack() as patched:
        for name, replacement in {
            "peak_memory": lambda *_: SimpleNamespace(bytes=lambda: 0, now_bytes=lambda: 0),
            "report_of": lambda *_: None,
            "gather_result": gather_nothing,
            "gather_timeline": gather_nothing,
        }.items():
            patched.enter_context(patch.object(train, name, replacement))
        return world.run(lambda rank: train.train(make_context(run, rank, world)))


def gather_nothing(*_: object) -> None:
    """Stand for the gathering of results."""
    gather_bytes(b"nothing")


def make_context(run: Run, rank: int, world: World) -> PipelineContext:
    shape = run.shape
    spec: Any = _Spec()
    transfers = {
        (c.source, c.target): [ValueSpec(f"from {c.source} to {c.target}", torch.float32, c.gradient, (BATCH,), (0,))]
        for c in shape.channels
    }
    plan = Plan.model_construct(
        stages=[
            Stage.model_construct(layers=(str(s),), ranks=r, recompute=False, sharded=run.sharded and len(r) > 1)
            for s, r in enumerate(shape.ranks)
        ],
        schedule=shape.schedule,
        microbatches=run.microbatches,
        microbatch_size=1,
        autocast=run.autocast,
        compiled=False,
        cluster=flat_cluster(1, 1e9).model_copy(update={"compress": run.compress}),
    )
    options = TrainingOptions(
        evaluate_every=run.evaluate_every, clip_grad_norm=1.0 if run.clipped else None, accumulate=run.accumulate
    )
    job = Job.model_construct(
        model="model.py",
        plan=plan,
        steps=run.minibatches,
        options=options,
        run_options=RunOptions(trace="trace.json" if run.traced else None),
    )
    shared = {pair: [_shared_name(pair)] for pair in run.tied}
    place = PretendedGPUs(CPU.compute, CPU.wire)
    held = {
        number: _held(number, run, (transfers, shared), plan.stages[number], rank) for number in shape.stages_of(rank)
    }
    evaluation = None
    if run.evaluate_every is not None:
        modules: Any = {number: _Stage(number, run, transfers) for number in held}
        evaluation = EvaluationStages(modules, transfers, len(shape.ranks) - 1, lambda known, batch: None, None, None)
    return PipelineContext(
        job=job,
        spec=spec,
        place=place,
        rank=rank,
        heartbeat=_Heartbeat(world),
        data=StandInData(run.microbatches),
        minibatches=run.minibatches,
        groups=DataGroups(place, timedelta(0)),
        shape=shape,
        stages=held,
        transfers=transfers,
        evaluation=evaluation,
    )


def _held(number: int, run: Run, exchanged: tuple[Any, dict[Any, list[str]]], planned: Stage, rank: int) -> HeldStage:
    transfers, names = exchanged
    module: Any = _Stage(number, run, transfers)
    shared = shared_parameters(number, module, names)
    spec: Any = _Spec()
    optimizer = StageOptimizer(
        spec,
        module,
        clip_grad_norm=1.0 if run.clipped else None,
        scale_loss=run.autocast == "float16",
        sharding=sharding_of(planned, module, shared, rank, CPU.wire),
    )
    return HeldStage(number, module, optimizer, SharedGradients(number, shared))


def _shared_name(pair: tuple[int, int]) -> str:
    return f"shared_{pair[0]}_{pair[1]}"
