"""Replicas read different microbatches, and still notice where they do not read the same data."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from planner.errors import ModelFileError, PlannerError
from planner.executor.run.comparison import EVERY, FIRST, BatchComparison, Fact
from planner.executor.run.data import DatasetBatches
from planner.executor.run.sample_checks import CheckedSamples, ItemChecks
from planner.executor.run.sample_reader import EVALUATION
from planner.executor.worker import launch
from planner.options.training import TrainingOptions
from planner.schedule.instructions import Unit
from planner.workers.job import Job, TrainResult
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs

MODEL = """
import os
import torch
from torch import nn
from torch.utils.data import Dataset, SequentialSampler

NAMES = [f"label {number}" for number in range(12)]
RANK = int(os.environ.get("RANK", 0))

def build_model():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 12))

def example_batch(batch_size):
    return (torch.randn(batch_size, 3),), torch.randint(0, 12, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

class Items(Dataset):
    def __init__(self):
        self.number = {name: number for number, name in enumerate(ORDER)}

    def __len__(self):
        return 48 + LONGER

    def __getitem__(self, index):
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return (x,), torch.tensor(self.number[NAMES[int(x.sum().abs() * 10) % 12]]) + SHIFT

def dataset():
    return Items()

def sampler(*_):
    return SequentialSampler(range(len(dataset())))
"""


def write(folder: Path, order: str = "NAMES", more: str = "", **values: str) -> Path:
    """Write the model file, with values for the words in capitals."""
    path = folder / "model.py"
    text = MODEL.replace("ORDER", order)
    for name, usual in {"LONGER": "0", "SHIFT": "0"}.items():
        text = text.replace(name, values.get(name.lower(), usual))
    path.write_text(text + more, encoding="utf-8")
    return path


def job_of(
    path: Path, replicas: tuple[int, ...], schedule: str = "1f1b-flush", **more: object
) -> Job:
    plan = make_plan(
        structural_profile(path, 4), replicas, schedule, 1 if schedule == "1f1b" else 2
    )
    return Job.model_validate({"model": str(path), "plan": plan, "steps": 4} | more)


def losses(result: TrainResult) -> list[float]:
    return [entry.loss for entry in result.losses if entry.loss is not None]


def test_sets_have_one_order_in_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels that are numbered in the order of a set: two replicas train as one process does."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    path = write(tmp_path, "set(NAMES)")
    alone, two = (launch(job_of(path, replicas, seed=5)) for replicas in ((1,), (2,)))
    assert losses(two) == pytest.approx(losses(alone), rel=1e-6)


def test_another_order_of_a_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(
        PlannerError, match=r"dataset\(\)\[\d+\] has other values on rank [01] than on"
    ) as caught:
        launch(job_of(write(tmp_path, "set(NAMES)"), (2,)))
    assert "PYTHONHASHSEED" in caught.value.hint


RANKED = """
class Ranked(SequentialSampler):
    def __iter__(self):
        return iter(range(48)[:: -1 if RANK else 1])

def sampler(*_):
    return Ranked(range(48))
"""


@pytest.mark.parametrize(
    ("schedule", "values", "more", "what"),
    [
        ("1f1b-flush", {"shift": "RANK % 2 - 1"}, "", r"dataset\(\)\[\d+\]"),
        ("1f1b", {"shift": "RANK % 2 - 1"}, "", r"dataset\(\)\[\d+\]"),
        ("1f1b-flush", {"longer": "8 * RANK"}, "", r"the number of samples of dataset\(\)"),
        ("1f1b", {}, RANKED, "the order of epoch 0"),
    ],
    ids=["items", "items, asynchronous", "length", "order"],
)
def test_replicas_that_read_other_data_are_refused(
    schedule: str,
    values: dict[str, str],
    more: str,
    what: str,
    tmp_path: Path,
) -> None:
    job = job_of(write(tmp_path, more=more, **values), (2,), schedule)
    with pytest.raises(AssertionError, match=rf"workers differ: {what}.* on rank [01] than on"):
        run_jobs([job], tmp_path)


def test_replicas_that_evaluate_on_other_data_are_refused(tmp_path: Path) -> None:
    more = """
class Shifted(Items):
    def __getitem__(self, index):
        (x,), target = super().__getitem__(index)
        return (x + RANK,), target

def evaluation_dataset():
    return Shifted()
"""
    job = job_of(write(tmp_path, more=more), (2,), options=TrainingOptions(evaluate_every=2))
    with pytest.raises(
        AssertionError, match=r"evaluation_dataset\(\)\[\d+\] has other values on rank [01] than on"
    ):
        run_jobs([job], tmp_path)


class Counting(Dataset[tuple[Tensor, Tensor]]):
    """Items that are others after so many reads; each draws from all generators."""

    def __init__(self, reads: float) -> None:
        self.reads = reads
        self.count = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.count += 1
        late = self.count > self.reads
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.tensor(index + drawn + late), torch.tensor(0.0)


def checked(reads: float) -> CheckedSamples:
    return CheckedSamples(DatasetBatches(Counting(reads), 4, 2, seed=1), BatchComparison(0))


def read_all(source: CheckedSamples, minibatches: int) -> None:
    for minibatch in range(minibatches):
        source.batch(Unit(minibatch, 0))


@pytest.mark.parametrize(
    ("reads", "latest"),
    [(30, FIRST), (4 * FIRST + 40, 2 * EVERY), (4 * 3 * EVERY, 4 * EVERY)],
)
def test_items_that_change_after_many_reads_are_refused(reads: int, latest: int) -> None:
    source = checked(reads)
    source.batch(Unit(0, 0))
    with pytest.raises(ModelFileError, match=r"dataset\(\)\[\d+\] is another sample than before"):
        read_all(source, latest + 1)


def test_items_that_stay_are_read_as_without_checks() -> None:
    source = checked(float("inf"))
    plain = DatasetBatches(Counting(float("inf")), 4, 2, seed=1)
    for minibatch in range(3 * EVERY):
        assert torch.equal(
            source.batch(Unit(minibatch, 1)).args[0], plain.batch(Unit(minibatch, 1)).args[0]
        )


def test_evaluation_items_that_change_are_refused() -> None:
    source = DatasetBatches(Counting(1), 4, 1, seed=1)
    checks = ItemChecks(source.reader, BatchComparison(0))
    checks.check(1, EVALUATION, 3)
    with pytest.raises(ModelFileError, match=r"dataset\(\)\[3\] is another sample than before"):
        checks.check(2, EVALUATION, 4)


class Noting(BatchComparison):
    """Notes what is compared."""

    def __init__(self) -> None:
        super().__init__(0)
        self.facts: dict[tuple[int, str], int] = {}

    def compare(self, fact: Fact) -> None:
        self.facts[fact.turn, fact.what] = fact.digest


def noted(minibatches: range) -> dict[tuple[int, str], int]:
    """Return what a replica compares that reads these minibatches."""
    comparison = Noting()
    source = CheckedSamples(DatasetBatches(Counting(float("inf")), 4, 2, seed=1), comparison)
    for minibatch in minibatches:
        source.batch(Unit(minibatch, 0))
    return comparison.facts


@pytest.mark.parametrize("replicas", [2, 3, 7])
@pytest.mark.parametrize("first", [0, 40])
def test_replicas_compare_the_same_items_whichever_minibatches_are_theirs(
    replicas: int, first: int
) -> None:
    every = [
        noted(range(first + replica, first + 4 * EVERY, replicas)) for replica in range(replicas)
    ]
    common = set.intersection(*(set(facts) for facts in every))
    assert {turn for turn, _ in common} >= {-1, *(EVERY * number for number in range(2, 4))}
    for facts in every[1:]:
        assert {key: facts[key] for key in common} == {key: every[0][key] for key in common}
