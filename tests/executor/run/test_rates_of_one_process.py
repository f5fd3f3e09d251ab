"""Rates and other hyperparameters of a stage are those that one process has, or the run is
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.executor.worker import launch
from planner.workers.job import Job, TrainResult
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

pytestmark = pytest.mark.usefixtures("warm_start")

MODEL = """
import os
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

def variable(name, usual):
    return int(os.environ.get(name, usual))

def build_model():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

def example_batch(batch_size):
    return (torch.randn(batch_size, 3),), torch.randint(0, 2, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return optim.AdamW(parameters, lr=0.1)
"""

OPTIMIZERS = {
    "WORLD_SIZE": "optim.SGD(parameters, lr=0.3 / variable('WORLD_SIZE', 1))",
    "RANK": "optim.AdamW(parameters, betas=(0.9 - 0.1 * variable('RANK', 0), 0.999))",
    "process group": "optim.SGD(parameters, lr=0.1,"
    " momentum=0.9 / (dist.get_world_size() if dist.is_initialized() else 1))",
    "groups": "optim.SGD([{'params': parameters[:1 + variable('LOCAL_WORLD_SIZE', 1)]},"
    " {'params': parameters[1 + variable('LOCAL_WORLD_SIZE', 1):], 'lr': 0.2}], lr=0.1)",
}
MESSAGES = {
    "WORLD_SIZE": r"optimizer\(\) gives group 0 of the parameters the `lr` 0.15 in this worker, "
    r"and 0.3 in one process",
    "RANK": r"gives group 0 of the parameters the `betas`",
    "process group": r"the `momentum` 0.45 in this worker, and 0.9 in one process",
    "groups": r"optimizer\(\) puts '.+' into another group in this worker than in one process",
}

NORM = """
class OfNorm(lr_scheduler.LRScheduler):
    def get_lr(self):
        norm = sum(
            float(p.detach().norm()) for g in self.optimizer.param_groups for p in g["params"]
        )
        return [0.01 * norm if self.last_epoch >= BEGINS else 0.1 for _ in self.base_lrs]

def scheduler(optimizer):
    return OfNorm(optimizer)
"""
WARM_UP = """
def scheduler(optimizer):
    return lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (8 // variable("WORLD_SIZE", 1)))
    )
"""
ORDINARY = """
def scheduler(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [3]
    )
"""


def job_of(
    folder: Path, more: str, replicas: tuple[int, ...], steps: int = 4, **other: object
) -> Job:
    path = folder / "model.py"
    path.write_text(MODEL + more, encoding="utf-8")
    plan = make_plan(structural_profile(path, 4), replicas, "1f1b-flush", 2)
    return Job.model_validate({"model": str(path), "plan": plan, "steps": steps} | other)


def losses(result: TrainResult) -> list[float]:
    return [entry.loss for entry in result.losses if entry.loss is not None]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_looks_at_the_workers_is_refused(name: str, tmp_path: Path) -> None:
    more = f"\ndef optimizer(parameters):\n    return {OPTIMIZERS[name]}\n"
    with pytest.raises(PlannerError, match=MESSAGES[name]):
        launch(job_of(tmp_path, more, (2,)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            NORM.replace("BEGINS", "0"),
            r"but scheduler\(\) gives '0.weight' another `lr` where it sees a part",
        ),
        (
            NORM.replace("BEGINS", "12"),
            r"scheduler\(\) gives group 0 of the parameters the `lr` .+ in this worker, and 0",
        ),
        (
            NORM.replace("BEGINS", "20"),
            r"scheduler\(\) gives group 0 of the parameters the `lr` .+ in this worker, and 0",
        ),
        (
            WARM_UP,
            r"scheduler\(\) gives group 0 of the parameters the `lr` 0.025 in this worker, "
            r"and 0.0125 in one",
        ),
    ],
    ids=["weights", "weights, later", "weights, much later", "WORLD_SIZE"],
)
def test_a_scheduler_that_looks_at_weights_or_workers_is_refused(
    more: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message):
        run_jobs([job_of(tmp_path, more, (1, 1), steps=40)], tmp_path)


def test_a_scheduler_may_look_at_weights_where_each_worker_has_all(tmp_path: Path) -> None:
    more = NORM.replace("BEGINS", "0")
    alone = run_jobs([job_of(tmp_path, more, (1,))], tmp_path)[0]
    two = run_jobs([job_of(tmp_path, more, (2,))], tmp_path)[0]
    assert losses(two) == pytest.approx(losses(alone), rel=1e-5)


def test_ordinary_schedulers_train_and_resume(tmp_path: Path) -> None:
    folder = {"checkpoint_folder": str(tmp_path / "checkpoints"), "checkpoint_every": 20}
    through = job_of(tmp_path, ORDINARY, (1, 1), steps=40)
    stopped = through.model_copy(update={"steps": 20})
    jobs = [through]
    for job, more in ((stopped, {}), (through, {"resume": "auto"})):
        jobs.append(Job.model_validate(job.model_dump() | {"checkpoints": folder | more}))
    whole, first, second = run_jobs(jobs, tmp_path)
    assert second.first_minibatch == 20
    assert losses(first) + losses(second) == losses(whole)
