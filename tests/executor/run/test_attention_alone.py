"""A pipeline whose attention alone recomputes trains as one process, and to the bit as one that
keeps it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.formats.plan import Plan
from planner.plan.attention import attention_groups
from planner.workers.job import Job
from tests.executor.plain_training import one_process
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

pytestmark = pytest.mark.usefixtures("warm_start")

SIZE, SEED, STEPS = 4, 3, 4

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scores = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / 8**0.5
        return x + self.out(torch.matmul(torch.softmax(scores, -1), self.value(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 19)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build_model():
    return Net()

def example_batch(batch_size):
    return (torch.randint(0, 19, (batch_size, 6)),), torch.randint(0, 19, (batch_size, 6))

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)
"""


def attention_again(plan: Plan, path: Path) -> Plan:
    """Return the plan with stages that recompute their attention alone."""
    layers = structural_profile(path, SIZE).layers
    position = {layer.name: number for number, layer in enumerate(layers)}
    stages = []
    for stage in plan.stages:
        groups = attention_groups(layers, [position[name] for name in stage.layers])
        assert groups
        named = tuple(tuple(layers[each].name for each in sorted(group)) for group in groups)
        stages.append(stage.model_copy(update={"recompute": named, "recompute_s": 0.0}))
    return plan.model_copy(update={"stages": tuple(stages)})


@pytest.mark.parametrize(
    ("schedule", "microbatches", "as_one"), [("1f1b-flush", 2, True), ("1f1b", 1, False)]
)
def test_attention_alone_changes_nothing(
    tmp_path: Path, schedule: str, microbatches: int, as_one: bool
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")
    kept = make_plan(structural_profile(path, SIZE), (1, 1), schedule, microbatches)
    jobs = [
        Job(
            model=str(path),
            plan=plan,
            steps=STEPS,
            seed=SEED,
            save_weights=str(tmp_path / f"{number}.pt"),
        )
        for number, plan in enumerate([kept, attention_again(kept, path)])
    ]
    before, again = run_jobs(jobs, tmp_path)
    weights, ours = (torch.load(str(job.save_weights), weights_only=True) for job in jobs)

    assert [each.loss for each in again.losses] == [each.loss for each in before.losses]
    for name, weight in weights.items():
        assert torch.equal(ours[name], weight), name
    if as_one:
        alone = one_process(path, SIZE, microbatches, SEED, STEPS)
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(ours[name], weight.detach())
