"""Training in real processes over gloo equals references that share nothing with the executor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.executor.data import RandomBatches, make_batches
from planner.executor.job import Job, TrainResult
from planner.model.capture import capture
from planner.model.file import ModelFile, load_model_file
from planner.model.stage import StageModule, build_stage
from planner.plan_file import ScheduleName
from planner.schedule.instructions import Unit
from tests.executor.models import MODELS, OPTIMIZERS, write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights, delayed_updates, plain_training

BATCH_SIZE = 4
SEED = 3

Case = tuple[str, str]  # model, optimizer
CASES: list[Case] = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]


def unsplit(model_file: ModelFile) -> StageModule:
    """The whole model as one stage, initialised as the workers do."""
    torch.manual_seed(SEED)
    graph = capture(model_file.build_model(), model_file.example_batch(BATCH_SIZE), model_file.loss)
    return build_stage(graph, [layer.name for layer in graph.layers])


def run_cases(
    folder: Path,
    cases: Sequence[Case],
    replicas: tuple[int, ...],
    minibatches: int,
    schedule: ScheduleName = "1f1b",
    microbatches: int = 1,
    depths: tuple[int, ...] | None = None,
) -> list[tuple[ModelFile, Job, TrainResult, Weights]]:
    """Train all cases in one set of processes; the jobs, their results and the weights at the end."""
    jobs = []
    for model, optimizer in cases:
        path = write_model(folder, model, optimizer)
        plan = make_plan(structural_profile(path, BATCH_SIZE), replicas, schedule, microbatches, depths)
        weights = str(folder / f"{model}-{optimizer}.pt")
        jobs.append(Job(model=str(path), plan=plan, steps=minibatches, seed=SEED, save_weights=weights))
    results = run_jobs(jobs, folder)
    saved = [torch.load(str(job.save_weights), weights_only=True) for job in jobs]
    return [
        (load_model_file(job.model), job, result, state)
        for job, result, state in zip(jobs, results, saved, strict=True)
    ]


@pytest.mark.parametrize(
    ("replicas", "minibatches", "depths"),
    [
        ((1, 1), 9, None),
        ((1, 1, 1), 9, None),
        ((2, 1), 9, None),
        ((2, 1, 1), 10, None),
        ((1, 2), 7, (5, 1)),
    ],
    ids=["1-1", "1-1-1", "2-1", "2-1-1", "1-2-deeper"],
)
def test_asynchronous_1f1b_equals_delayed_updates_to_the_bit(
    replicas: tuple[int, ...], minibatches: int, depths: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """SGD, momentum and AdamW; BatchNorm, dropout, skips, integers; partial last rounds (9 = 4 * 2 + 1)."""
    for model_file, job, result, weights in run_cases(tmp_path, CASES, replicas, minibatches, depths=depths):
        whole = unsplit(model_file)
        owner = {
            name: layer for layer in structural_profile(model_file.path, BATCH_SIZE).layers for name in layer.parameters
        }
        stage_of = {layer: index for index, stage in enumerate(job.plan.stages) for layer in stage.layers}
        data = make_batches(model_file, BATCH_SIZE, 1, SEED)

        def forward_loss(model: nn.Module, minibatch: int, data: RandomBatches = data) -> Tensor:
            assert isinstance(model, StageModule)
            model.set_random_key(SEED, minibatch, 0)
            return model(data.batch(Unit(minibatch)), {})["loss"]

        names = [
            [name for name in dict(whole.named_parameters()) if stage_of[owner[name].name] == stage]
            for stage in range(len(replicas))
        ]
        losses, expected = delayed_updates(
            whole, names, replicas, model_file.optimizer, forward_loss, minibatches, depths
        )
        assert [entry.loss for entry in result.losses] == losses, job.model
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), (job.model, name)
        assert max(report.weight_versions for report in result.reports) > 1


@pytest.mark.parametrize(
    ("schedule", "microbatches", "replicas"),
    [
        ("naive", 1, (1, 1)),
        ("gpipe", 4, (1, 1)),
        ("gpipe", 3, (2, 1)),
        ("1f1b-flush", 4, (1, 1)),
        ("1f1b-flush", 5, (1, 2)),
    ],
)
def test_synchronous_schedules_equal_plain_training(
    schedule: ScheduleName, microbatches: int, replicas: tuple[int, ...], tmp_path: Path
) -> None:
    """To rounding; BatchNorm normalises each microbatch by itself, in the reference too."""
    minibatches = 6
    for model_file, job, result, weights in run_cases(tmp_path, CASES, replicas, minibatches, schedule, microbatches):
        whole = unsplit(model_file)
        data = make_batches(model_file, BATCH_SIZE, microbatches, SEED)

        def microbatch_losses(model: nn.Module, minibatch: int, data: RandomBatches = data) -> list[Tensor]:
            assert isinstance(model, StageModule)
            losses = []
            for microbatch in range(microbatches):
                model.set_random_key(SEED, minibatch, microbatch)
                losses.append(model(data.batch(Unit(minibatch, microbatch)), {})["loss"])
            return losses

        losses, expected = plain_training(whole, model_file.optimizer, microbatch_losses, minibatches)
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-4), job.model
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5, msg=f"{job.model} {name}")
