"""Every verb that reads a plan, on the answers of `plan fit` to many questions: none ends in an
error of our own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.formats.plan import load_plan
from tests.cli.in_process import plan

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(1024)
        self.first, self.second = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 1024)
        self.blocks = nn.ModuleList([Block() for _ in range(8)])
        self.head = nn.Linear(1024, 1000)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Net()


def example_batch(batch_size):
    tokens = torch.randint(0, 1000, (batch_size, 128))
    return (tokens,), tokens


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters):
    return torch.optim.Adam(parameters)
"""
TIGHT = (
    "--autocast",
    "--gpus",
    "4",
    "--bandwidth",
    "10Gbps",
    "--memory",
    "3063MB",
    "--batch-size",
    "16",
    "--minibatch",
    "64",
)
QUESTIONS = {
    "recomputing": TIGHT,  # 1-1, of which both stages recompute some blocks
    "wide": ("--gpus", "2", "--minibatch", "128"),
    "asynchronous": (*TIGHT, "--schedule", "2bw", "--memory", "3463MB"),
    "blocks": (*TIGHT, "--recompute", "blocks"),
    "whole": (*TIGHT, "--recompute", "always"),
    "coded": (*TIGHT, "--compress", "int8"),
    "stashing": (
        "--gpus",
        "4",
        "--bandwidth",
        "10Gbps",
        "--schedule",
        "1f1b",
        "--batch-size",
        "16",
    ),
    "layers": (*TIGHT, "--granularity", "layer", "--memory", "3013MB"),
    "servers": (
        "--gpus",
        "8",
        "--servers",
        "2",
        "--bandwidth",
        "nvlink3,10Gbps",
        "--memory",
        "2950MB",
        "--autocast",
    ),
    "split": (*TIGHT, "--schedule", "zb-h1", "--memory", "3463MB"),
    "gpipe": (*TIGHT, "--schedule", "gpipe", "--gpus", "3", "--minibatch", "48"),
    "sharded": (
        "--gpus",
        "4",
        "--shard-optimizer",
        "always",
        "--minibatch",
        "64",
        "--batch-size",
        "4",
    ),
    "half": (
        "--gpus",
        "6",
        "--gpu",
        "v100",
        "--dtype",
        "float16",
        "--bandwidth",
        "10Gbps",
        "--memory",
        "2963MB",
    ),
}
QUICK = ("recomputing", "wide")
VERBS = (
    ("show",),
    ("show", "--json"),
    ("simulate",),
    ("simulate", "--trace", "trace.json"),
    ("explain",),
    ("explain", "--json"),
    ("compare",),
    ("report",),
)
LIMITED = ("explain", "compare", "report")
SYSTEMS = ("megatron", "torchtitan")


@pytest.mark.parametrize(
    "question",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in QUESTIONS],
)
def test_every_verb_on_an_answer_of_fit(question: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    fitted = plan("fit", "model.py", *QUESTIONS[question], "--time-limit", "10s", cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    found = load_plan(tmp_path / "plan.json")
    assert question != "recomputing" or all(stage.recompute_groups for stage in found.stages)
    ends = ["--stages", ",".join(stage.layers[-1] for stage in found.stages[:-1]) or "1"]
    chosen = [
        *ends,
        "--replicas",
        ",".join(map(str, found.replicas)),
        "--schedule",
        found.schedule.name,
    ]
    price = ("price", "--gpus", "8", "--bandwidth", "10Gbps", *chosen, "-o", "priced.json")
    for verb in (*VERBS, price):
        limit = ("--time-limit", "2s") if verb[0] in LIMITED else ()
        done = plan(*verb, *limit, cwd=tmp_path)
        assert done.returncode == 0, (verb, done.stderr)
    for system in SYSTEMS:
        done = plan("export", "--to", system, cwd=tmp_path)
        # What a system cannot express is wrong input, with a hint.
        assert done.returncode == 0 or (done.returncode == 2 and "hint:" in done.stderr), (
            system,
            done.stderr,
        )
