"""A loss that ignores padded labels trains as on one device, however minibatches are divided."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.api.running import train
from planner.executor.run.data import BatchSource, FedBatches, WeightedBatches, even_sizes
from planner.formats.plan import Plan
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.loss import shares_function
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.training import TrainingOptions
from planner.schedule.instructions import Unit
from planner.workers.job import Job
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

pytestmark = pytest.mark.usefixtures("warm_start")

PADDED = LossMean(over="labels", ignored=-100)
SEED, SAMPLES, EPOCHS = 3, 21, 2

# Sequences of different lengths. Every seventh has no label at all.
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))

class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 21

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 11, (6,), generator=generator)
        labels = torch.randint(0, 11, (6,), generator=generator)
        labels[index % 7:] = -100
        return (tokens,), labels

def build_model():
    return Net()

def example_batch(batch_size):
    return (torch.randint(0, 11, (batch_size, 6)),), torch.randint(0, 11, (batch_size, 6))

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

def dataset():
    return Sequences()

def evaluation_dataset():
    return Sequences()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "padded.py"
    written.write_text(MODEL, encoding="utf-8")
    return written


def plan_of(
    path: Path, replicas: tuple[int, ...], schedule: str, microbatches: int, size: int
) -> Plan:
    profile = structural_profile(path, size).model_copy(update={"loss": PADDED})
    return make_plan(profile, replicas, schedule, microbatches)


def one_device(spec: TrainingSpec, minibatch_size: int) -> tuple[nn.Module, list[float]]:
    """Train the whole model on whole minibatches, in the order of the product's data; return it and
    the losses.
    """
    losses = []
    torch.manual_seed(SEED)
    model = spec.build_model()
    optimizer = spec.optimizer(list(model.parameters()))
    dataset = spec.dataset()
    assert dataset is not None
    assert spec.loss is not None
    for epoch in range(EPOCHS):
        order = order_of(epoch)
        for start in range(0, SAMPLES, minibatch_size):
            items = [dataset[index] for index in order[start : start + minibatch_size]]
            tokens, labels = (
                torch.stack([item[0][0] for item in items]),
                torch.stack([item[1] for item in items]),
            )
            optimizer.zero_grad()
            loss = spec.loss(model(tokens), labels)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
    return model, losses


def order_of(epoch: int) -> list[int]:
    """Return the samples of an epoch in the order of the product's data."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
    found: list[int] = torch.randperm(SAMPLES, generator=generator).tolist()
    return found


def mean_loss(spec: TrainingSpec, model: nn.Module) -> float:
    dataset = spec.dataset()
    assert dataset is not None
    assert spec.loss is not None
    items = [dataset[index] for index in range(SAMPLES)]
    tokens, labels = (
        torch.stack([item[0][0] for item in items]),
        torch.stack([item[1] for item in items]),
    )
    with torch.no_grad():
        return float(spec.loss(model(tokens), labels))


def test_every_schedule_and_replica_trains_as_one_device(path: Path, tmp_path: Path) -> None:
    """Microbatches of one sample may have no label, and the last minibatch is smaller."""
    plans = [
        plan_of(path, (1, 2), "1f1b-flush", 8, 1),
        plan_of(path, (2, 1), "1f1b-flush", 4, 2),
        plan_of(path, (1, 1, 1), "zb-h1", 4, 2),
        plan_of(path, (1, 1, 1), "gpipe", 8, 1),
    ]
    jobs = [
        Job(
            model=str(path),
            plan=plan,
            epochs=EPOCHS,
            seed=SEED,
            save_weights=str(tmp_path / f"{number}.pt"),
            options=TrainingOptions(evaluate_every=6),
        )
        for number, plan in enumerate(plans)
    ]
    results = run_jobs(jobs, tmp_path)
    spec = load_model_file(path)
    model, losses = one_device(spec, 8)
    for job, result in zip(jobs, results, strict=True):
        weights = torch.load(str(job.save_weights), weights_only=True)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)
        assert result.evaluations[-1].loss == pytest.approx(mean_loss(spec, model), rel=1e-5)
        assert [each.loss for each in result.losses] == pytest.approx(losses, rel=1e-5)


def test_a_minibatch_in_which_nothing_counts_is_a_step_as_on_one_device(tmp_path: Path) -> None:
    """Its loss is no number, its gradients are zeros, and weights decay."""
    second = order_of(0)[8:16]
    padding = "labels[index % 7:] = -100"
    text = MODEL.replace(padding, f"labels[0 if index in {second} else index % 7:] = -100")
    text = text.replace("SGD(parameters, lr=0.5, momentum=0.9)", "AdamW(parameters, lr=0.1)")
    path = tmp_path / "nothing.py"
    path.write_text(text, encoding="utf-8")

    plans = [plan_of(path, replicas, "1f1b-flush", 4, 2) for replicas in ((1, 1), (2,))]
    jobs = [
        Job(
            model=str(path),
            plan=plan,
            epochs=EPOCHS,
            seed=SEED,
            save_weights=str(tmp_path / f"{number}.pt"),
        )
        for number, plan in enumerate(plans)
    ]
    results = run_jobs(jobs, tmp_path)

    model, losses = one_device(load_model_file(path), 8)
    for job, result in zip(jobs, results, strict=True):
        weights = torch.load(str(job.save_weights), weights_only=True)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)
        found = [math.nan if each.loss is None else each.loss for each in result.losses]
        assert found == pytest.approx(losses, rel=1e-5, nan_ok=True)
        assert math.isnan(found[1])


def test_data_parallelism_trains_as_one_device(path: Path) -> None:
    result = train(
        path,
        plan_of(path, (1, 1), "1f1b-flush", 4, 2),
        epochs=EPOCHS,
        seed=SEED,
        baseline="data-parallel",
    )
    _, losses = one_device(load_model_file(path), 8)
    assert [each.loss for each in result.losses] == pytest.approx(losses, rel=1e-5)


class _Counted(BatchSource):
    """Batches of one sample whose labels count as often as the microbatch's number says; notes what
    is read.
    """

    def __init__(self) -> None:
        super().__init__(4)
        self.read: list[Unit] = []

    def batch(self, unit: Unit) -> Batch:
        self.read.append(unit)
        labels = torch.full((1, 6), -100)
        labels[0, : unit.microbatch] = 1
        return Batch((torch.zeros(1),), {}, labels)

    def minibatch_size(self, minibatch: int) -> int:
        return 4

    def minibatches(self, steps: int | None, epochs: int | None) -> int:
        return 1


def test_a_worker_without_the_loss_reads_its_own_microbatches_alone(path: Path) -> None:
    shares = shares_function(PADDED, load_model_file(path))
    assert shares is not None
    source = _Counted()
    with_loss = WeightedBatches(source, shares, whole=True)
    with_loss.batch(Unit(0, 1))
    assert [with_loss.share(Unit(0, number)) for number in range(4)] == [0, 1 / 6, 2 / 6, 3 / 6]
    assert source.read == [Unit(0, number) for number in range(4)]  # each once
    source.read.clear()
    WeightedBatches(source, shares, whole=False).batch(Unit(0, 1))
    assert source.read == [Unit(0, 1)]


def test_the_own_loops_batches_count_by_their_labels(path: Path) -> None:
    fed = FedBatches(2, 4, shares_function(PADDED, load_model_file(path)))
    labels = torch.tensor([[1, 1, 1, -100], [-100, -100, 1, -100], [-100] * 4])
    fed.feed(Batch((torch.zeros(3, 4),), {}, labels))
    assert even_sizes(3, 2) == [2, 1]
    assert [fed.share(Unit(0, number)) for number in range(2)] == [1.0, 0.0]
    fed.feed(Batch((torch.zeros(3, 4),), {}, torch.full_like(labels, -100)))
    assert [fed.share(Unit(1, number)) for number in range(2)] == [2 / 3, 1 / 3]
    plain = FedBatches(2, 4)
    plain.feed(Batch((torch.zeros(3, 4),), {}, labels))
    assert [plain.share(Unit(0, number)) for number in range(2)] == [2 / 3, 1 / 3]
