"""Replicas whose blocks use other weights in a backward train as one process does, whatever of them
is divided.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.workers.job import Job
from tests.executor.plans import make_plan, sharded, structural_profile
from tests.executor.processes import run_jobs

SEED, STEPS = 3, 4

# Experts in a loop of Python. Of each minibatch of four samples, some use an expert that the sample
# on the other replica does not use, or none at all; and an expert that nobody uses has no gradient,
# which AdamW's decay would show.
MODEL = """
import torch
from torch import nn
from torch.utils.data import SequentialSampler

CHOICES = [0, 1, -1, 1, 0, 0, 2, -1, -1, -1, 1, 2, 1, 1, 1, -1]

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, False)])

    def forward(self, x):
        made = x.clone()
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                made = made.index_add(0, rows, torch.tanh(expert(x[rows])))
        return made

def build_model():
    return nn.Sequential(Experts(), nn.Linear(8, 3)).double()

def blocks(model):
    return list(model)

def example_batch(size):
    return (torch.randn(size, 8, dtype=torch.float64),), torch.randint(0, 3, (size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return len(CHOICES)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator, dtype=torch.float64)
        x[0] = CHOICES[index]
        return (x,), torch.randint(0, 3, (), generator=generator)

def dataset():
    return Data()

def sampler(microbatch_size, microbatches, seed):
    return SequentialSampler(range(len(CHOICES)))
"""


@pytest.mark.parametrize(
    ("replicas", "group", "recomputes"),
    [
        (2, None, False),
        pytest.param(2, None, True, marks=pytest.mark.slow),
        pytest.param(4, 2, False, marks=pytest.mark.slow),
    ],
)
def test_experts_without_rows_on_a_replica_train_as_in_one_process(
    replicas: int, group: int | None, recomputes: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    profile = structural_profile(path, 1)

    def job(name: str, replicas: int, level: int = 0) -> Job:
        plan = make_plan(profile, (replicas,), "1f1b-flush", 4)
        if level:
            plan = sharded(plan, level, group)
        if recomputes:
            (stage,) = plan.stages
            plan = plan.model_copy(
                update={"stages": (stage.model_copy(update={"recompute": True}),)}
            )
        weights = str(tmp_path / f"{name}.pt")
        return Job(model=str(path), plan=plan, steps=STEPS, seed=SEED, save_weights=weights)

    (alone,) = run_jobs([job("alone", 1)], tmp_path)
    expected = torch.load(tmp_path / "alone.pt", weights_only=True)
    levels = (2, 3)
    results = run_jobs([job(str(level), replicas, level) for level in levels], tmp_path)

    for level, result in zip(levels, results, strict=True):
        losses = [[each.loss for each in run.losses] for run in (result, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9), level
        found = torch.load(tmp_path / f"{level}.pt", weights_only=True)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-7, atol=1e-9, msg=name)
