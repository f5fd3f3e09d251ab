"""A last stage whose labels come from an earlier one, so that its layers read no batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.api.running import train
from planner.errors import PlannerError
from planner.formats.plan import Plan
from planner.formats.profile import ForbiddenLabel, LossMean
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from planner.workers.job import Job
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

pytestmark = pytest.mark.usefixtures("warm_start")
SEED, SAMPLES = 3, 12

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens, labels):
        labels = labels.reshape(-1)
        logits = self.head(torch.tanh(self.hidden(self.embedding(tokens))))
        return {"loss": nn.functional.cross_entropy(logits.reshape(-1, 11), labels)}

class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 11, (6,), generator=generator)
        labels = tokens.roll(-1)
        PADDING
        return (), {"tokens": tokens, "labels": labels}, None

def build_model():
    return Net()

def example_batch(size):
    tokens = torch.randint(0, 11, (size, 6))
    return (), {"tokens": tokens, "labels": tokens}, None

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5)

def sampler(microbatch_size, microbatches, seed):
    return torch.utils.data.SequentialSampler(range(12))

def dataset():
    return Sequences()

def evaluation_dataset():
    return Sequences()
"""


def write(folder: Path, padding: str) -> Path:
    path = folder / "labels.py"
    path.write_text(MODEL.replace("PADDING", padding), encoding="utf-8")
    return path


def plan_of(path: Path, mean: LossMean) -> Plan:
    """Return a plan of two stages, of which the second has the head and the loss."""
    profile = structural_profile(path, 3).model_copy(update={"loss": mean})
    return make_plan(profile, (1, 1), "1f1b-flush", 2)


def test_an_evaluation_counts_the_labels(tmp_path: Path) -> None:
    path = write(tmp_path, "labels[1 + index // 3:] = -100")
    job = Job(
        model=str(path),
        plan=plan_of(path, LossMean(over="labels", ignored=-100)),
        steps=2,
        seed=SEED,
        options=TrainingOptions(evaluate_every=2),
        save_weights=str(tmp_path / "weights.pt"),
    )
    (result,) = run_jobs([job], tmp_path)

    spec = load_model_file(path)
    model = spec.build_model()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    dataset = spec.dataset()
    assert dataset is not None
    items = [dataset[index][1] for index in range(SAMPLES)]
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    with torch.no_grad():
        expected = float(model(**batch)["loss"])
    assert result.evaluations[-1].loss == pytest.approx(expected, rel=1e-5)


def test_labels_that_the_plan_forbids_are_refused(tmp_path: Path) -> None:
    """From the second minibatch on, which is not looked at before the run."""
    path = write(tmp_path, "labels[3:] = -100 if index > 8 else labels[3:]")
    mean = LossMean(over="samples", forbidden=(ForbiddenLabel(leaf=0, value=-100),))
    with pytest.raises(PlannerError, match=r"has the value -100, with which the loss of"):
        train(path, plan_of(path, mean), steps=2, seed=SEED)
