"""What the loss does not go back to has no gradient, as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file
from planner.workers.job import Job
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

pytestmark = pytest.mark.usefixtures("warm_start")
SEED, STEPS, SIZE, MICROBATCHES = 3, 4, 2, 2

# The last stage takes what the first one makes for an output that the loss does not read.
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.before = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.after = nn.Linear(8, 8)
        TIE

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        aside = self.before(hidden)
        hidden = torch.tanh(self.third(torch.tanh(self.second(hidden))))
        return self.head(hidden), self.after(aside)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator, dtype=torch.float64)
        return (x,), torch.randint(0, 3, (), generator=generator)

def build_model():
    return Net().double()

def example_batch(size):
    return (torch.randn(size, 8, dtype=torch.float64),), torch.randint(0, 3, (size,))

def loss(output, target):
    return nn.functional.cross_entropy(output[0], target)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

def dataset():
    return Rows()

def sampler(microbatch_size, microbatches, seed):
    return torch.utils.data.SequentialSampler(range(16))
"""
TIES = {"apart": "pass", "tied": "self.after.weight = self.before.weight"}


def in_one_process(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps."""
    spec = load_model_file(path)
    torch.manual_seed(SEED)
    model = spec.build_model()
    optimizer = spec.optimizer(list(model.parameters()))
    dataset = spec.dataset()
    assert dataset is not None
    assert spec.loss is not None
    each = SIZE * MICROBATCHES
    for start in range(0, STEPS * each, each):
        items = [dataset[index] for index in range(start, start + each)]
        x = torch.stack([item[0][0] for item in items])
        target = torch.stack([item[1] for item in items])
        optimizer.zero_grad()
        torch.autograd.backward(spec.loss(model(x), target))
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("tie", TIES)
def test_what_is_off_the_loss_stays_as_in_one_process(tie: str, tmp_path: Path) -> None:
    path = tmp_path / f"{tie}.py"
    path.write_text(MODEL.replace("TIE", TIES[tie]), encoding="utf-8")
    profile = structural_profile(path, SIZE)
    jobs = [
        Job(
            model=str(path),
            plan=make_plan(profile, (1, 1, 1), schedule, MICROBATCHES),
            steps=STEPS,
            seed=SEED,
            save_weights=str(tmp_path / f"{schedule}.pt"),
        )
        for schedule in ("1f1b-flush", "zb-h1")
    ]
    assert any((each.source, each.target) == (0, 2) for each in jobs[0].plan.transfers)
    assert bool(jobs[0].plan.shared) == (tie == "tied")

    run_jobs(jobs, tmp_path)
    expected = in_one_process(path)
    for job in jobs:
        found = torch.load(str(job.save_weights), weights_only=True)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("returned", "off"),
    [
        ("head(hidden), self.after(aside)", True),
        ("head(hidden), self.after(aside.detach())", True),
        ("head(hidden + aside.detach()), self.after(hidden)", True),
        ("head(hidden + aside), self.after(aside)", False),
        ("head(hidden.clone().copy_(aside)), self.after(hidden)", False),
    ],
)
def test_the_graph_tells_what_is_off_the_loss(returned: str, off: bool, tmp_path: Path) -> None:
    path = tmp_path / "returned.py"
    text = MODEL.replace("TIE", "pass").replace("head(hidden), self.after(aside)", returned)
    path.write_text(text, encoding="utf-8")
    spec = load_model_file(path)
    graph = capture_file(spec, spec.example_batch(SIZE))
    assert ("before.weight" in graph.off_loss) == off
    assert "first.weight" not in graph.off_loss

    model = graph.model
    batch = spec.example_batch(SIZE)
    assert spec.loss is not None
    torch.autograd.backward(spec.loss(model(*batch.args), batch.target))
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert without == graph.off_loss & dict(model.named_parameters()).keys()
