"""Buffers that workers would have otherwise are noticed, and an evaluation leaves those of training
alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.errors import PlannerError
from planner.executor.run.train import train_worker
from planner.formats.plan import Plan
from planner.model.batch import collate
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from planner.workers.job import Job
from tests.drawn.trainings import trained
from tests.executor.models import DATASET, DIVIDED, EVALUATION, OPTIMIZERS, write_model
from tests.executor.plans import in_groups, make_plan, sharded, structural_profile
from tests.executor.reference import Weights

pytestmark = pytest.mark.usefixtures("warm_start")

OWN_NORM = """
import torch
from torch import nn
import torch.nn.functional as F

class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.running_mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.running_mean

def build_model():
    return nn.Sequential(OwnNorm(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

def blocks(model):
    return list(model)

def example_batch(n):
    return (torch.randn(n, 8) + 3,), torch.randint(0, 3, (n,))

def loss(output, target):
    return F.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return (torch.randn(8, generator=g) + i % 5,), torch.randint(0, 3, (), generator=g)

def dataset():
    return Data()

def evaluation_dataset():
    return Data()
"""
CAPTURED = OWN_NORM.replace("def blocks(", "def _unused(")
PLAIN_RUN = TrainingOptions()
# Experts whose router leaves out those that had most tokens so far.
COUNTS = "self.register_buffer('load', torch.zeros(count))"
ROUTER = "weights, chosen = self.router(tokens).softmax(-1).topk(2)"
BALANCED = """scores = self.router(tokens).softmax(-1)
        _, chosen = (scores - 0.01 * self.load).topk(2)
        weights = scores.gather(1, chosen)
        if self.training:
            one_each = torch.arange(self.count, device=x.device)[:, None]
            self.load.add_((chosen.flatten() == one_each).sum(1))"""
MOMENT = "self.count, self.drop = count, nn.Dropout(share)"


def written(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text, encoding="utf-8")
    return path


def balanced_experts(folder: Path) -> Path:
    text = DIVIDED["experts alone"].replace("OPTIMIZER", OPTIMIZERS["sgd"])
    for old, new in (
        ("nn.Dropout(0.1)", "nn.Dropout(0.0)"),
        ("dropout_p=0.1", "dropout_p=0.0"),
        (MOMENT, f"{MOMENT}\n        {COUNTS}"),
        (ROUTER, BALANCED),
    ):
        assert old in text
        text = text.replace(old, new)
    return written(folder, text + DATASET.replace("SAMPLES", "32") + EVALUATION)


def by_samples(path: Path) -> Plan:
    plan = in_groups(make_plan(structural_profile(path, 4), (1,), "1f1b", 1), 2)
    return plan.model_copy(update={"by_samples": True})


def job_of(path: Path, plan: Plan, steps: int, options: TrainingOptions = PLAIN_RUN) -> Job:
    weights = str(path.with_name("weights.pt"))
    return Job(
        model=str(path), plan=plan, steps=steps, seed=3, options=options, save_weights=weights
    )


def saved(job: Job) -> Weights:
    weights: Weights = torch.load(str(job.save_weights), weights_only=True)
    return weights


def evaluation_losses(job: Job) -> list[float] | None:
    """Train, and return the losses of the evaluations."""
    result = train_worker(job)
    return None if result is None else [each.loss or 0.0 for each in result.evaluations]


def loss_of_saved(job: Job) -> float:
    """Evaluate the weights that a run has saved, in one process."""
    spec = load_model_file(job.model)
    model = spec.build_model()
    model.load_state_dict(saved(job))
    dataset = spec.evaluation_dataset()
    batch = collate([dataset[index] for index in range(len(dataset))])  # type: ignore[arg-type]
    assert spec.loss is not None
    with torch.no_grad():
        return float(spec.loss(model.eval()(*batch.args), batch.target))


def test_ranks_with_samples_of_their_own_are_watched(tmp_path: Path) -> None:
    path = balanced_experts(tmp_path)
    with pytest.raises(PlannerError, match=r"'blocks.\d.experts.load' in minibatch \d, and each"):
        trained(job_of(path, by_samples(path), 2), tmp_path)


def test_ranks_with_samples_of_their_own_evaluate_with_the_saved_buffers(tmp_path: Path) -> None:
    path = balanced_experts(tmp_path)
    options = TrainingOptions(accept_divided_loss=True, evaluate_every=4)
    job = job_of(path, by_samples(path), 4, options)
    (found,) = trained(job, tmp_path, evaluation_losses)
    assert found == pytest.approx(loss_of_saved(job), rel=1e-5)


def test_a_buffer_named_as_one_of_batch_norm_is_watched(tmp_path: Path) -> None:
    path = written(tmp_path, CAPTURED)
    plan = make_plan(structural_profile(path, 4), (2,), "1f1b")
    with pytest.raises(PlannerError, match=r"'0.running_mean' in minibatch \d, and each worker"):
        trained(job_of(path, plan, 4), tmp_path)


def test_an_evaluation_of_blocks_leaves_the_buffers_of_replicas_alone(tmp_path: Path) -> None:
    path = written(tmp_path, OWN_NORM)
    plan = make_plan(structural_profile(path, 4), (2,), "1f1b")
    losses = [
        trained(job_of(path, plan, 6, options), tmp_path)
        for options in (
            TrainingOptions(accept_divided_loss=True),
            TrainingOptions(accept_divided_loss=True, evaluate_every=2),
        )
    ]
    assert losses[0] == losses[1]


def test_a_microbatch_without_samples_counts_in_no_buffer(tmp_path: Path) -> None:
    path = write_model(tmp_path, "convolutional", "sgd", samples=18)
    plan = make_plan(structural_profile(path, 2), (2,), "1f1b-flush", 4)
    states = []
    for level in (1, 2):
        job = job_of(path, sharded(plan, level), 3)
        trained(job, tmp_path)
        states.append(saved(job))
    whole, divided = states
    for name in (name for name in whole if ".norm." in name):
        torch.testing.assert_close(divided[name], whole[name])
    assert int(divided["blocks.0.norm.num_batches_tracked"]) == 5
