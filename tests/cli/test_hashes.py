"""A model that makes its operations in the order of a set: every process of ours has the same
order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_profile_is_of_the_graph_that_workers_capture(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    plan(tmp_path, "profile", "model.py", "--batch-size", "4", "--seconds", "0.05")
    plan(tmp_path, "price", "--stages", "2", "--gpus", "2", "--bandwidth", "1Gbps")
    plan(tmp_path, "train", "model.py", "--steps", "2")
