"""A weight that two stages share: said when solving, trained as one, refused where its copies would differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.middle = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.middle(self.embedding(words)))


def build_model():
    return Tied()


def example_batch(batch_size):
    return torch.randint(0, 50, (batch_size, 16)), torch.randint(0, 50, (batch_size, 16))


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_weight_of_two_stages_is_named_when_solving_and_trained(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert plan(tmp_path, "profile", "model.py", "--batch-size", "4", "--repeats", "3").returncode == 0
    solve = ("solve", "--gpus", "2", "--bandwidth", "100Gbps")
    pinned = plan(tmp_path, *solve, "--pin", "embedding=0", "--pin", "head=1")
    assert pinned.returncode == 0, pinned.stderr
    assert "note: stages 0 and 1 share the weight 'embedding.weight'" in pinned.stderr
    trained = plan(tmp_path, "train", "model.py", "--steps", "3")
    assert trained.returncode == 0, trained.stderr
    synced = plan(tmp_path, *solve, "--pin", "embedding=0", "--pin", "head=1", "--vertical-sync")
    assert "warning: stages 0 and 1 share the weight 'embedding.weight'" in synced.stderr
    refused = plan(tmp_path, "train", "model.py", "--steps", "2")
    assert refused.returncode == 2
    assert "error: stages 0 and 1 share the weight 'embedding.weight'" in refused.stderr
    assert "hint: solve with --colocate embedding,head; or leave out --vertical-sync" in refused.stderr
    together = plan(tmp_path, *solve, "--colocate", "embedding,head")
    assert together.returncode == 0, together.stderr
    assert "share the weight" not in together.stderr
