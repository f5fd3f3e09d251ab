"""Replicas that divide the optimizer's state train as replicas do that all have the whole of it: to
the bit.

Sums of two terms do not depend on their order, so two replicas show it. Only a norm to clip by is
another sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch

from planner.executor.checkpoint.folders import complete, load_checkpoint
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.options import PLAIN, ModuleOptions
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.workers.job import Job
from tests.executor.models import write_model
from tests.executor.plans import make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs

BATCH_SIZE, SEED, MINIBATCHES = 4, 3, 7

SCHEDULER = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
"""
# A loss so large that the first scales of float16 overflow.
STEEP = """
def loss(output, target):
    return 200 * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-4)
"""
# Adagrad has state before its first step; biases have a group of their own; and some weights are
# not trained.
GROUPS = """
def optimizer(named_parameters):
    trained = [(name, p) for name, p in named_parameters if "norm" not in name]
    groups = [{"params": [p for _, p in trained if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for _, p in trained if p.dim() == 1]}]
    return torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1)
"""
# Matrices of blocks stay whole, each with one replica; embedding, head and biases are divided by
# elements.
NEWEST_MUON = """
from docs.examples.newest_muon import NewestMuon

def optimizer(named_parameters):
    return NewestMuon(named_parameters, lr=0.01)
"""


@dataclass(frozen=True)
class Case:
    """A run of a plan, with all that may meet a divided optimizer."""

    model: str
    optimizer: str
    schedule: str
    microbatches: int = 1
    replicas: tuple[int, ...] = (2, 1)
    chunks: int = 1
    more: str = ""
    options: TrainingOptions = field(default_factory=TrainingOptions)
    float16: bool = False

    @property
    def exact(self) -> bool:
        """Whether all sums have the same order."""
        return self.options.clip_grad_norm is None

    def jobs(self, folder: Path) -> list[Job]:
        """The run without and with a divided optimizer."""
        folder.mkdir()
        path = write_model(folder, self.model, self.optimizer, more=self.more)
        profile = _profile(path, ModuleOptions(torch.float16) if self.float16 else PLAIN)
        plan = make_plan(
            profile, self.replicas, self.schedule, self.microbatches, chunks=self.chunks
        )
        return [_job(path, each, folder / f"{name}.pt", self.options) for name, each in _both(plan)]


def _both(plan: Plan) -> Sequence[tuple[str, Plan]]:
    return ("whole", plan), ("sharded", sharded(plan))


def _job(path: Path, plan: Plan, weights: Path, options: TrainingOptions) -> Job:
    return Job(
        model=str(path),
        plan=plan,
        steps=MINIBATCHES,
        seed=SEED,
        save_weights=str(weights),
        options=options,
    )


@cache
def _profile(path: Path, options: ModuleOptions) -> Profile:
    return structural_profile(path, BATCH_SIZE, options)


CLIPPED = TrainingOptions(clip_grad_norm=0.3)
FEW = [
    Case("language", "adamw", "1f1b", options=TrainingOptions(clip_grad_norm=0.3, scale_lr=True)),
    Case("tied", "adamw", "1f1b-flush", 3, more=SCHEDULER),
    Case("language", "sgd", "1f1b-flush", 2, more=STEEP, float16=True),
    Case("language", "adamw", "1f1b", more=NEWEST_MUON),
]
THREE = [
    Case("language", "adamw", "1f1b", more=SCHEDULER),
    Case("language", "adamw", "2bw", 3, (1, 2), options=CLIPPED),
    Case("convolutional", "adamw", "1f1b-flush", 4, (1, 2)),
    Case("language", "adamw", "gpipe", 3, more=GROUPS),
    Case("language", "adamw", "1f1b-flush", 2, options=CLIPPED),
    Case("language", "sgd", "1f1b", more=STEEP, float16=True),
]
FOUR = [
    Case("tied", "adamw", "1f1b", replicas=(2, 2)),
    Case("tied", "adamw", "1f1b-flush", 3, (2, 2), options=CLIPPED),
    Case("language", "adamw", "zb-h1", 3, (2, 2)),
    Case("tied", "momentum", "interleaved", 4, (2, 2, 2, 2), chunks=2),
    Case("convolutional", "adamw", "zb-v", 4, (2, 2, 2, 2), chunks=2),
    Case("blocks", "adamw", "1f1b", replicas=(3, 1)),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FEW, id="few", marks=pytest.mark.slow),
        pytest.param(THREE, id="3 workers", marks=pytest.mark.slow),
        pytest.param(FOUR, id="4 workers", marks=pytest.mark.slow),
    ],
)
def test_dividing_the_optimizer_changes_nothing(cases: Sequence[Case], tmp_path: Path) -> None:
    """Under all schedules, with clipping, accumulation, schedulers, tied weights, overflows,
    BatchNorm.
    """
    jobs = [case.jobs(tmp_path / str(index)) for index, case in enumerate(cases)]
    results = run_jobs([job for both in jobs for job in both], tmp_path)
    for case, both, whole, divided in zip(cases, jobs, results[::2], results[1::2], strict=True):
        one, other = (torch.load(str(job.save_weights), weights_only=True) for job in both)
        losses = [[entry.loss for entry in result.losses] for result in (whole, divided)]
        if case.exact and max(case.replicas) == 2:
            assert losses[0] == losses[1], case
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()), case
        else:
            assert losses[0] == pytest.approx(losses[1], rel=1e-4), case
            for name, tensor in one.items():
                torch.testing.assert_close(
                    tensor, other[name], rtol=1e-3, atol=1e-5, msg=f"{case} {name}"
                )


def test_any_plan_goes_on_where_another_stopped(tmp_path: Path) -> None:
    """The first stage's optimizer is divided, then none, then the second stage's."""
    path = write_model(tmp_path, "language", "adamw", more=SCHEDULER)
    profile = _profile(path, PLAIN)
    # A sum of two microbatches is the same on one replica and on two.
    plans = {
        replicas: make_plan(profile, replicas, "1f1b-flush", 2) for replicas in [(2, 1), (1, 2)]
    }
    course = [sharded(plans[2, 1]), plans[1, 2], sharded(plans[1, 2])]
    jobs = [
        _job(path, plans[2, 1], tmp_path / "whole.pt", TrainingOptions()).model_copy(
            update={"steps": 6}
        )
    ]
    for number, plan in enumerate(course):
        checkpoints = CheckpointOptions(
            checkpoint_folder=str(tmp_path / "checkpoints"),
            checkpoint_every=2,
            resume="auto" if number else None,
        )
        job = _job(path, plan, tmp_path / f"{number}.pt", TrainingOptions())
        jobs.append(job.model_copy(update={"steps": 2 * (number + 1), "checkpoints": checkpoints}))
    whole, *rest = run_jobs(jobs, tmp_path)
    assert [result.first_minibatch for result in rest] == [0, 2, 4]
    assert [entry.loss for entry in whole.losses] == [
        entry.loss for result in rest for entry in result.losses
    ]
    one, other = (
        torch.load(str(job.save_weights), weights_only=True) for job in (jobs[0], jobs[-1])
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    newest = load_checkpoint(complete(tmp_path / "checkpoints")[-1])
    sizes = [
        p.optimizer_file.size_bytes
        for p in newest.index.parts
        if p.stage == 1 and p.optimizer_file is not None
    ]
    assert len(sizes) == 2
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2), "each replica has half of the state"
