"""Groups of ranks that divide their layers train as one rank does, to rounding, whatever the schedule.

Models are in float64, where rounding is far from what a wrong gradient, or another dropout mask, would do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.executor.checkpoint.trained_weights import read_trained
from planner.executor.job import CheckpointOptions, Job, TrainingOptions, TrainResult
from planner.executor.run.data import make_batches
from planner.formats.profile import Profile
from planner.model.load import capture_file
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import StageModule, build_stage
from planner.schedule.instructions import Unit
from tests.executor.models import write_model
from tests.executor.plans import in_groups, make_plan, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights, delayed_updates, double_buffered, plain_training

BATCH_SIZE, SEED, MINIBATCHES = 4, 3, 20
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


class Reference:
    """The unsplit model in one process, initialised as the workers do, on the same data with the same dropout."""

    def __init__(self, path: Path, microbatches: int) -> None:
        self.spec, self.microbatches = load_model_file(str(path)), microbatches
        torch.manual_seed(SEED)
        model = self.spec.build_model()  # before the batch, which also draws random numbers
        graph = capture_file(self.spec, self.spec.example_batch(BATCH_SIZE), model)
        self.whole = build_stage(graph, [layer.name for layer in graph.layers])
        self.data = make_batches(self.spec, BATCH_SIZE, microbatches, SEED)

    def loss(self, model: nn.Module, minibatch: int, microbatch: int = 0) -> Tensor:
        assert isinstance(model, StageModule)
        model.set_random_key(SEED, minibatch, microbatch)
        loss: Tensor = model(self.data.batch(Unit(minibatch, microbatch)), {})["loss"]
        return loss

    def train(self, schedule: str, names: Sequence[Sequence[str]], replicas: Sequence[int]) -> tuple[list[float], Weights]:
        """Return the losses and the weights at the end."""
        make, count = self.spec.optimizer, self.microbatches
        if schedule == "1f1b":
            return delayed_updates(self.whole, names, replicas, make, self.loss, MINIBATCHES)
        if schedule == "2bw":
            return double_buffered(self.whole, names, replicas, make, self.loss, MINIBATCHES, count)
        parts: Callable[[nn.Module, int], list[Tensor]] = lambda model, minibatch: [
            self.loss(model, minibatch, microbatch) for microbatch in range(count)
        ]
        return plain_training(self.whole, make, parts, MINIBATCHES)


@cache
def _profile(path: Path) -> Profile:
    return structural_profile(path, BATCH_SIZE)


def check(folder: Path, replicas: Sequence[int], schedules: Sequence[tuple[str, int]], optimizer: str = "momentum") -> None:
    """Train with groups of two ranks, and compare with the reference."""
    path = write_model(folder, "attention", optimizer)
    jobs = []
    for schedule, microbatches in schedules:
        plan = in_groups(make_plan(_profile(path), replicas, schedule, microbatches), 2)
        weights = str(folder / f"{schedule}.pt")
        jobs.append(Job(model=str(path), plan=plan, steps=MINIBATCHES, seed=SEED, save_weights=weights))
    for job, result, (schedule, microbatches) in zip(jobs, run_jobs(jobs, folder), schedules, strict=True):
        owner = {name: layer.name for layer in _profile(path).layers for name in layer.parameters}
        reference = Reference(path, microbatches)
        all_names = [name for name, _ in reference.whole.named_parameters()]
        names = [[name for name in all_names if owner[name] in stage.layers] for stage in job.plan.stages]
        losses, expected = reference.train(schedule, names, replicas)
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-7), schedule
        weights = torch.load(str(job.save_weights), weights_only=True)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, msg=lambda text: f"{schedule} {name}: {text}", **CLOSE)


def test_one_stage_of_two_ranks(tmp_path: Path) -> None:
    check(tmp_path, (1,), [("1f1b", 1), ("1f1b-flush", 2), ("2bw", 2)])


def test_two_stages_of_two_ranks(tmp_path: Path) -> None:
    check(tmp_path, (1, 1), [("1f1b", 1), ("1f1b-flush", 3), ("2bw", 3)])


def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    check(tmp_path, (2,), [("1f1b", 1), ("1f1b-flush", 3), ("2bw", 3)])
