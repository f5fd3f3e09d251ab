"""A model that makes its operations in the order of a set: every process of ours has the same
order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner import hashes
from planner.formats.plan import load_plan
from planner.workers.job import Job
from planner.workers.launch import launching
from tests.cli import in_process
from tests.executor.processes import run_jobs

MODEL = """
import torch
from torch import nn

NAMES = {"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: nn.Linear(4, number + 1) for number, name in enumerate(sorted(NAMES))}
        )
        self.head = nn.Linear(36, 2)

    def forward(self, x):
        made = {name: self.parts[name](x) for name in NAMES}
        return self.head(torch.cat([made[name] for name in sorted(NAMES)], 1))


def build_model():
    return Net()


def example_batch(size):
    return (torch.randn(size, 4),), torch.randn(size, 2)


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
TIMEOUT_S = 240


def plan(folder: Path, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, "-m", "planner", *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model file, and a plan from a profile that a process of its own made."""
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    plan(tmp_path, "profile", "model.py", "--batch-size", "4", "--seconds", "0.05")
    cluster = ("--gpus", "2", "--bandwidth", "1Gbps")
    priced = in_process.plan("price", "--stages", "2", *cluster, cwd=tmp_path)
    assert priced.returncode == 0, priced.stderr
    return tmp_path


def test_a_profile_is_of_the_graph_that_workers_capture(folder: Path) -> None:
    """Workers refuse a plan for another graph; they are forked here from a process that has their
    hashes.
    """
    job = Job(model=str(folder / "model.py"), plan=load_plan(folder / "plan.json"), steps=2)
    (result,) = run_jobs([job], folder)
    assert len(result.losses) == 2


def test_workers_are_started_with_the_hashes_of_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(hashes.VARIABLE, raising=False)
    with launching(None):
        assert os.environ[hashes.VARIABLE] == hashes.SEED


@pytest.mark.slow
def test_a_launched_run_trains_by_that_profile(folder: Path) -> None:
    plan(folder, "train", "model.py", "--steps", "2")
