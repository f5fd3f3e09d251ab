"""The data-parallel baseline: one stage on all workers, with the plan's minibatches."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.api.running import train
from planner.executor.run.train import data_parallel
from planner.model.spec import load_model_file
from planner.workers.job import Job
from tests.executor import eager
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

pytestmark = pytest.mark.usefixtures("warm_start")


@pytest.mark.parametrize(
    ("schedule", "microbatches", "count"),
    [
        pytest.param("1f1b-flush", 5, 47, id="an uneven share, and a smaller last minibatch"),
        pytest.param("2bw", 2, 25, id="a last minibatch of one sample"),
    ],
)
def test_it_trains_like_one_process_with_the_plans_minibatches(
    schedule: str, microbatches: int, count: int, tmp_path: Path
) -> None:
    path = write_model(tmp_path, "language", "momentum", samples=count)
    plan = make_plan(structural_profile(path, 4), (1, 1), schedule, microbatches)
    result = train(path, plan, epochs=2, seed=eager.SEED, baseline="data-parallel")
    spec = load_model_file(path)
    model = eager.build(spec)
    losses = eager.train(spec, model, eager.minibatches(spec, 4 * microbatches, 2))
    assert result.minibatch_size == 4 * microbatches
    assert result.minibatches == len(losses)
    assert result.samples == 2 * count
    assert (result.config, result.schedule, result.predicted_samples_per_s) == (
        "2",
        "data-parallel",
        None,
    )
    # Each loss depends on the updates before it, so a wrong gradient shows.
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-5)


def test_undivided_minibatches_make_whole_rounds(tmp_path: Path) -> None:
    """DistributedDataParallel waits for a backward of every worker."""
    path = write_model(tmp_path, "language", "momentum", samples=20)
    plan = make_plan(structural_profile(path, 4), (1, 1), "1f1b", 1)
    result = train(path, plan, epochs=1, seed=eager.SEED, baseline="data-parallel")
    assert (result.schedule, result.minibatches) == ("data-parallel", 6)


UNUSED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x) + self.unused(x).detach()

def build_model():
    return Model()

def example_batch(batch_size):
    return (torch.randn(batch_size, 8),), torch.randn(batch_size, 8)

def loss(output, target):
    return nn.functional.mse_loss(output, target)
"""


def test_weights_without_gradients_hold_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "unused.py"
    path.write_text(UNUSED, encoding="utf-8")
    plan = make_plan(structural_profile(path, 4), (1, 1), "1f1b-flush", 4)
    result = train(path, plan, steps=3, baseline="data-parallel")
    assert len(result.losses) == 3


def test_with_fewer_microbatches_than_workers_each_has_one(tmp_path: Path) -> None:
    profile = structural_profile(write_model(tmp_path, "language", "momentum"), 4)
    job = data_parallel(
        Job(model="model.py", plan=make_plan(profile, (1, 1, 1), "1f1b-flush", 2), steps=6)
    )
    assert (job.plan.config, job.plan.microbatches, job.steps) == ("3", 3, 4)
    undivided = data_parallel(
        Job(model="model.py", plan=make_plan(profile, (2, 1), "1f1b", 1), steps=6)
    )
    assert (undivided.plan.schedule.name, undivided.plan.microbatches, undivided.steps) == (
        "1f1b",
        1,
        6,
    )
