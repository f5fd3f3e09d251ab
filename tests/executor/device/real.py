"""Workers with real stages: layers of a captured model, its optimizer and its data, as in
training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

from planner.executor.run.build_context import pipeline_context
from planner.executor.run.context import PipelineContext
from planner.executor.run.data import make_batches
from planner.formats.plan import Plan
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.training import DriftOptions, RunOptions, TrainingOptions
from planner.schedule.registry import SCHEDULES
from planner.workers.job import Job
from planner.workers.place import CPU
from tests.executor.device.runs import Heart, PretendedGPUs, Run
from tests.executor.device.world import World
from tests.executor.known_captures import each_captured_once
from tests.executor.plans import in_groups, make_plan, sharded, structural_profile

# A weight that the first and the last layer share, a value that every block needs, dropout, and a
# norm with buffers.
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4)]
        )
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.head = nn.Linear(8, 19, bias=False)
        TIE

    def forward(self, tokens):
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = x + self.drop(block(torch.cat([x, first], -1)))
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))

def build_model():
    return Net()

def example_batch(batch_size):
    tokens = torch.randint(0, 19, (batch_size, 5))
    return (tokens,), tokens.roll(-1, 1)

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)
"""
MICROBATCH = 2


def make_real_context(run: Run, rank: int, world: World) -> PipelineContext:
    """Build a worker as training does, beside its device: what it makes before training is there
    when it begins.
    """
    spec, plan = _model_and_plan(run)
    options = TrainingOptions(clip_grad_norm=1.0 if run.clipped else None)
    job = Job(
        model=spec.origin,
        plan=plan,
        steps=run.minibatches,
        options=options,
        run_options=RunOptions(),
        drift=DriftOptions(drift_window=0),
    )
    data = make_batches(spec, MICROBATCH, run.microbatches, seed=0)
    with patch.dict(os.environ, RANK=str(rank)), each_captured_once():
        return pipeline_context(job, spec, PretendedGPUs(CPU.compute, CPU.wire), Heart(world), data)


@cache
def _model_and_plan(run: Run) -> tuple[TrainingSpec, Plan]:
    path = _model_file(bool(run.tied))
    plan = make_plan(
        structural_profile(path, MICROBATCH),
        run.replicas,
        run.schedule,
        run.microbatches,
        chunks=run.chunks,
    )
    plan = sharded(plan) if run.sharded else plan
    return load_model_file(str(path)), in_groups(
        plan, *run.degree_of_stage
    ) if run.degrees else plan


@cache
def _model_file(tied: bool) -> Path:
    path = Path(mkdtemp()) / "model.py"
    path.write_text(MODEL.replace("TIE", "self.head.weight = self.embed.weight" if tied else ""))
    return path


def runs() -> Iterator[Run]:
    """Yield runs of every schedule: straight, with replicas, and with all that has code of
    its own.
    """
    for schedule in SCHEDULES:
        chunks = (schedule.fixed_chunks or 2) if schedule.chunked else 1
        microbatches = 4 if schedule.divides else 1

        def run(*replicas: int, **more: Any) -> Run:
            return Run(schedule.name, replicas * chunks, microbatches, chunks, **more)  # noqa: B023

        yield run(1, 1)
        yield run(1, 1, 1) if schedule.chunked else run(2, 1)
        yield run(1, 1, degrees=(2, 2))
        yield run(2, 2, degrees=(2, 2)) if schedule.chunked else run(2, 1, degrees=(1, 2))
        last = 2 * chunks - 1
        if schedule.asynchronous:
            yield run(1, 2)
        else:
            yield run(1, 1, tied=((0, last),), clipped=True)
            yield run(2, 2, sharded=True)
