"""Replicas of a stage that begin with different weights are noticed before they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.workers.job import Job
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

MODEL = """
import os
import torch
from torch import nn

def build_model():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight.add_(CHANGE)
    return model

def example_batch(batch_size):
    return (torch.randn(batch_size, 3),), torch.randint(0, 2, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


def job_of(folder: Path, change: str, replicas: tuple[int, ...]) -> Job:
    path = folder / "model.py"
    path.write_text(MODEL.replace("CHANGE", change), encoding="utf-8")
    plan = make_plan(structural_profile(path, 4), replicas, "1f1b-flush", 2)
    return Job(model=str(path), plan=plan, steps=2)


def test_replicas_with_other_weights_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, "0.1 * int(os.environ.get('RANK', 0))", (2,))
    with pytest.raises(
        AssertionError, match=r"the initial state of stage 0 has other values on rank \d than"
    ):
        run_jobs([job], tmp_path)


def test_replicas_with_equal_weights_train(tmp_path: Path) -> None:
    assert run_jobs([job_of(tmp_path, "0.1", (2,))], tmp_path)[0].minibatches == 2
