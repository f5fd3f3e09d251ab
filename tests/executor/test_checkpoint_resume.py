"""A run that is stopped at a checkpoint and goes on equals, to the bit, one that drained its pipeline there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from planner.executor.job import CheckpointOptions, Job, TrainResult
from planner.plan_file import Plan, ScheduleName
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

SEED = 3
BATCH_SIZE = 4
CASES = [("convolutional", "adamw"), ("convolutional", "momentum"), ("language", "sgd"), ("blocks", "adamw")]


def job_of(path: Path, plan: Plan, folder: Path, name: str, steps: int, **options: object) -> Job:
    """A run with checkpoints in a folder of its own, and its weights beside it."""
    content = {
        "model": str(path),
        "plan": plan,
        "steps": steps,
        "seed": SEED,
        "save_weights": str(folder / f"{path.stem}-{name}.pt"),
        "checkpoints": CheckpointOptions.model_validate(
            {"folder": str(folder / f"{path.stem}-{name}"), "every": 7} | options
        ),
    }
    return Job.model_validate(content)


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    assert job.save_weights is not None
    state: dict[str, torch.Tensor] = torch.load(job.save_weights, weights_only=True)
    return state


def assert_same_weights(one: Job, other: Job) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), (one.model, name)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "replicas"),
    [
        pytest.param("1f1b", 1, (2, 1), id="1f1b 2-1"),
        pytest.param("1f1b", 1, (1, 1), id="1f1b 1-1", marks=pytest.mark.slow),
        pytest.param("gpipe", 3, (1, 1), id="gpipe 1-1", marks=pytest.mark.slow),
        pytest.param("1f1b-flush", 4, (1, 2), id="1f1b-flush 1-2", marks=pytest.mark.slow),
        pytest.param("2bw", 2, (1, 1), id="2bw 1-1", marks=pytest.mark.slow),
        pytest.param("zb-h1", 3, (1, 1), id="zb-h1", marks=pytest.mark.slow),
        pytest.param("interleaved", 3, (1, 1, 1, 1), id="interleaved", marks=pytest.mark.slow),
        pytest.param("naive", 1, (1, 1), id="naive 1-1", marks=pytest.mark.slow),
    ],
)
def test_going_on_equals_not_having_stopped(
    schedule: ScheduleName, microbatches: int, replicas: Sequence[int], tmp_path: Path
) -> None:
    """Losses and weights; momentum, AdamW's moments and step counts, BatchNorm, dropout, the place in the data."""
    whole, before, after = [], [], []
    for model, optimizer in CASES:
        path = write_model(tmp_path, model, optimizer)
        plan = make_plan(structural_profile(path, BATCH_SIZE), replicas, schedule, microbatches)
        whole.append(job_of(path, plan, tmp_path, "whole", 13))
        before.append(job_of(path, plan, tmp_path, "stopped", 7))
        after.append(job_of(path, plan, tmp_path, "stopped", 13, resume="auto"))
    results = run_jobs([*whole, *before, *after], tmp_path)
    for index, job in enumerate(whole):
        one, first, second = results[index :: len(CASES)]
        assert second.first_minibatch == 7
        assert losses(one) == losses(first) + losses(second)
        assert_same_weights(job, after[index])


def losses(result: TrainResult) -> list[tuple[int, float | None]]:
    return [(entry.minibatch, entry.loss) for entry in result.losses]
