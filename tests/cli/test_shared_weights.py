"""A weight that two stages share: said when solving, trained as one, refused where its copies would
differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.solve import complaints
from planner.formats.plan import load_plan
from planner.formats.profile import load_profile
from tests.cli.in_process import plan

pytestmark = pytest.mark.usefixtures("warm_start")

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


def test_a_weight_of_two_stages_is_named_when_solving_and_trained(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert (
        plan("profile", "model.py", "--batch-size", "4", "--repeats", "3", cwd=tmp_path).returncode
        == 0
    )
    cluster = ("--gpus", "2", "--bandwidth", "100Gbps")
    priced = plan("price", *cluster, "--stages", "middle.1", cwd=tmp_path)
    assert priced.returncode == 0, priced.stderr
    (note,) = (
        text
        for kind, text, _ in complaints(
            load_plan(tmp_path / "plan.json"), load_profile(tmp_path / "profile.json")
        )
        if kind == "note" and "share the weight" in text
    )
    assert note.startswith("stages 0 and 1 share the weight 'embedding.weight'")
    trained = plan("train", "model.py", "--steps", "3", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
