"""Groups by attributes and rates by shapes are those of one process where ranks divide weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.formats.plan import Plan
from planner.workers.job import Job
from tests.executor.plans import in_groups, make_plan, structural_profile
from tests.executor.processes import run_jobs

SEED, STEPS = 3, 4

MODEL = """
import torch
from torch import nn
from torch.utils.data import SequentialSampler, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        self.first.bias._no_weight_decay = True

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))

def build_model():
    return Net().double()

def tensor_parallel_plan():
    return {"first": "colwise", "second": "rowwise"}

def example_batch(size):
    return (torch.randn(size, 8, dtype=torch.float64),), torch.randint(0, 3, (size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def dataset():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (16,), generator=generator))

def sampler(microbatch_size, microbatches, seed):
    return SequentialSampler(range(16))
"""

BY_SHAPE_AND_ATTRIBUTE = """
def optimizer(parameters):
    return torch.optim.AdamW([
        {
            "params": [each],
            "lr": 0.8 / each.shape[-1],
            "weight_decay": 0.0 if getattr(each, "_no_weight_decay", False) else 0.5,
        }
        for each in parameters
    ])
"""

WITH_STATE = """
def optimizer(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)
"""


def test_ranks_that_divide_weights_have_the_groups_of_one_process(tmp_path: Path) -> None:
    files = {"groups": BY_SHAPE_AND_ATTRIBUTE, "state": WITH_STATE}
    paths = [tmp_path / f"{name}.py" for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        path.write_text(MODEL + content, encoding="utf-8")

    def jobs(degree: int) -> list[Job]:
        return [
            Job(
                model=str(path),
                plan=_plan(path, degree),
                steps=STEPS,
                seed=SEED,
                save_weights=f"{path}.{degree}.pt",
            )
            for path in paths
        ]

    results = zip(run_jobs(jobs(1), tmp_path), run_jobs(jobs(2), tmp_path), strict=True)
    for path, (alone, divided) in zip(paths, results, strict=True):
        losses = [[each.loss for each in run.losses] for run in (divided, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9), path.name
        expected, found = (
            torch.load(f"{path}.{degree}.pt", weights_only=True) for degree in (1, 2)
        )
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-7, atol=1e-9, msg=name)


def _plan(path: Path, degree: int) -> Plan:
    plan = make_plan(structural_profile(path, 2), (1,), "1f1b-flush", 2)
    return in_groups(plan, degree) if degree > 1 else plan
