"""Data that are drawn at random are the same in all workers, under every plan: what one process
would draw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from planner.errors import ModelFileError, PlannerError
from planner.executor.run.data import DatasetBatches, EvaluationBatches, make_batches
from planner.executor.worker import launch
from planner.model.batch import Batch, collate
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from planner.schedule.instructions import Unit
from planner.workers.job import Job, TrainResult
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.run.drawing import plain_evaluation, plain_losses, write_drawing

pytestmark = pytest.mark.usefixtures("warm_start")

SEED = 5
STEPS = 9  # an epoch of six minibatches, and half of another


SLOW = """
import time

class Slow(Drawn):
    def __getitem__(self, index):
        time.sleep(1e-3)
        return super().__getitem__(index)

def dataset():
    return Slow(44)
"""


def _losses(result: TrainResult) -> list[float]:
    return [entry.loss for entry in result.losses if entry.loss is not None]


def _job(
    path: Path, microbatch: int, microbatches: int, replicas: tuple[int, ...], **more: Any
) -> Job:
    plan = make_plan(structural_profile(path, microbatch), replicas, "1f1b-flush", microbatches)
    return Job.model_validate(
        {"model": str(path), "plan": plan, "steps": STEPS, "seed": SEED} | more
    )


def test_training_is_that_of_one_process(tmp_path: Path) -> None:
    """Stages and replicas, several microbatches, a run that goes on in mid-epoch, and a dataset
    that is read slowly.
    """
    path = write_drawing(tmp_path)
    slow_folder = tmp_path / "slow"
    slow_folder.mkdir()
    slow = write_drawing(slow_folder, SLOW)
    folder = {"checkpoint_folder": str(tmp_path / "checkpoints"), "checkpoint_every": 4}
    evaluates = TrainingOptions(evaluate_every=4)
    jobs = [
        _job(path, 8, 1, (1, 1)),
        _job(path, 2, 4, (1, 1), options=evaluates),
        _job(path, 2, 4, (2,)),
        _job(slow, 2, 4, (1, 1)),
        _job(path, 2, 4, (1, 1), checkpoints=folder, steps=4),
        _job(path, 2, 4, (1, 1), checkpoints=folder | {"resume": "auto"}),
    ]
    results = run_jobs(jobs, tmp_path)

    whole = plain_losses(path, SEED, 8, 1, STEPS)
    parts = plain_losses(path, SEED, 2, 4, STEPS)
    assert whole != parts, "collate draws for each microbatch"
    assert _losses(results[0]) == whole
    for result in results[1:4]:
        assert _losses(result) == pytest.approx(parts, rel=1e-6)
    assert _losses(results[1]) == parts
    stopped, resumed = results[4:]
    assert resumed.first_minibatch == 4
    assert _losses(stopped) + _losses(resumed) == _losses(results[1])


INVENTED = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

def build_model():
    return nn.Sequential(nn.Linear(4, 32), nn.Dropout(DROPOUT), nn.Linear(32, 32), nn.Linear(32, 1))

def example_batch(n):
    x = torch.randn(n, 4)
    return (x,), x.sum(1, keepdim=True)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)

class Invented(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        x = DRAW
        return (x,), x.sum(0, keepdim=True)

def dataset():
    return Invented()
"""


def test_inputs_and_targets_are_of_the_same_samples(tmp_path: Path) -> None:
    """A sum is learned exactly, and with dropout nearly; targets of other samples leave the loss at
    about 4.
    """
    cases = {
        "numpy": ("torch.from_numpy(np.random.randn(4)).float()", 0.0, 1e-3),
        "python": ("torch.tensor([random.gauss(0, 1) for _ in range(4)])", 0.0, 1e-3),
        "torch": ("torch.randn(4)", 0.05, 0.2),
    }
    jobs = []
    for name, (draw, dropout, _) in cases.items():
        path = tmp_path / f"{name}.py"
        path.write_text(INVENTED.replace("DROPOUT", str(dropout)).replace("DRAW", draw), "utf-8")
        jobs.append(_job(path, 8, 1, (1, 1), steps=200))
    for (_, _, limit), result in zip(cases.values(), run_jobs(jobs, tmp_path), strict=True):
        assert _losses(result)[-1] < limit


def test_evaluation_data_are_drawn_alike_each_time(tmp_path: Path) -> None:
    path = write_drawing(tmp_path)
    spec = load_model_file(path)
    data = make_batches(spec, 4, 1, SEED)
    expected = plain_evaluation(path, SEED, 4)
    for _ in range(2):
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        evaluation = EvaluationBatches(
            spec.evaluation_dataset(), 4, collate=spec.collate, seed=SEED
        )
        data.batch(Unit(3))
        for number, inputs in enumerate(expected):
            assert torch.equal(evaluation.batch(Unit(number)).args[0], inputs)


def test_reading_leaves_the_generators_alone(tmp_path: Path) -> None:
    spec = load_model_file(write_drawing(tmp_path))

    def numbers() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    data = make_batches(spec, 4, 2, SEED)
    for minibatch in range(3):
        data.batch(Unit(minibatch))
    load_model_file(spec.origin)
    assert numbers() == expected


class _Data(Dataset[tuple[Tensor, Tensor]]):
    """Samples that `read` makes."""

    def __init__(self, read: Callable[[int], float]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = self.read(index)
        return torch.tensor(value), torch.tensor(-value)


def _numpy_generator() -> Callable[[int], float]:
    own = np.random.default_rng(0)
    return lambda _: float(own.normal())


def _torch_generator() -> Callable[[int], float]:
    own = torch.Generator().manual_seed(0)
    return lambda _: float(torch.rand((), generator=own))


def _python_generator() -> Callable[[int], float]:
    own = random.Random(0)
    return lambda _: own.random()


def _counter() -> Callable[[int], float]:
    reads: list[int] = []

    def count(index: int) -> float:
        reads.append(index)
        return float(len(reads))

    return count


def _fresh_generator() -> Callable[[int], float]:
    return lambda _: float(np.random.default_rng().normal())


def _kept_draws() -> Callable[[int], float]:
    """Draw when an item is read first, which one worker does in another epoch than the next."""
    kept: dict[int, float] = {}
    return lambda index: kept[index] if index in kept else kept.setdefault(index, random.random())


@pytest.mark.parametrize(
    ("make_read", "message"),
    [
        (
            _numpy_generator,
            r"^dataset\(\)\[\d+\] is another sample when it is read again "
            r"with the same random numbers",
        ),
        (_torch_generator, "is another sample when it is read again"),
        (_python_generator, "is another sample when it is read again"),
        (_counter, "is another sample when it is read again"),
        (_fresh_generator, "is another sample when it is read again"),
        (
            _kept_draws,
            "draws other random numbers when it is read again, so it depends on what was read "
            "before",
        ),
    ],
)
def test_a_dataset_that_depends_on_earlier_reads_is_refused(
    make_read: Callable[[], Callable[[int], float]], message: str
) -> None:
    data = DatasetBatches(_Data(make_read()), 4, 1, seed=1)
    with pytest.raises(ModelFileError, match=message) as caught:
        data.batch(Unit(0))
    assert "numpy.random.default_rng(index)" in caught.value.hint
    evaluation = EvaluationBatches(_Data(make_read()), 4)
    with pytest.raises(ModelFileError, match=message.replace(r"^dataset", "^evaluation_dataset")):
        evaluation.batch(Unit(0))


@pytest.mark.parametrize(
    "read",
    [
        lambda index: float(np.random.default_rng(index).normal()),
        lambda index: float(torch.rand((), generator=torch.Generator().manual_seed(index))),
        lambda index: random.Random(index).random(),
        lambda index: random.gauss(0, 1) + np.random.randn() + float(torch.randn(())),
    ],
)
def test_the_ways_out_are_accepted(read: Callable[[int], float]) -> None:
    one, other = (DatasetBatches(_Data(read), 4, 1, seed=1) for _ in range(2))
    batches = [one.batch(Unit(minibatch)) for minibatch in range(6)]
    for minibatch in (4, 0, 3):
        assert torch.equal(other.batch(Unit(minibatch)).args[0], batches[minibatch].args[0])


def test_a_collate_that_depends_on_earlier_calls_is_refused() -> None:
    own = np.random.default_rng(0)

    def noisy(samples: Sequence[Any]) -> Batch:
        batch = collate(samples)
        return replace(batch, target=batch.target + own.normal())

    evaluation = EvaluationBatches(_Data(float), 4, collate=noisy)
    with pytest.raises(
        ModelFileError, match=r"collate\(\) makes another batch of the same samples"
    ):
        evaluation.batch(Unit(0))


RANKED = """
import os

class Ranked(Drawn):
    \"\"\"One sample is another on each worker.\"\"\"

    def __getitem__(self, index):
        shift = float(os.environ["RANK"]) if index == PLACE else 0.0
        (x,), target = super().__getitem__(index)
        return (x + shift,), target

def sampler(*_):
    return torch.utils.data.SequentialSampler(range(len(dataset())))

def NAME():
    return Ranked(COUNT)
"""


@pytest.mark.parametrize(
    ("name", "count", "place", "what"),
    [
        ("dataset", 44, 13, "microbatch 2 of minibatch 1"),
        pytest.param(
            "evaluation_dataset",
            6,
            5,
            "batch 2 of the evaluation after minibatch 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_workers_that_read_different_data_end_with_an_error(
    name: str, count: int, place: int, what: str, tmp_path: Path
) -> None:
    more = RANKED.replace("NAME", name).replace("COUNT", str(count)).replace("PLACE", str(place))
    path = write_drawing(tmp_path, more)
    job = _job(path, 2, 4, (1, 1), options=TrainingOptions(evaluate_every=2))
    with pytest.raises(
        PlannerError, match=f"{what} has other values on rank [01] than on rank [01]"
    ) as caught:
        launch(job)
    assert "may depend on the seed, the epoch and the index alone" in caught.value.hint
