"""Weights of several stages: their copies train as the one weight that they are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.errors import PlanError
from planner.executor.run.build_context import pipeline_context
from planner.executor.run.data import BatchSource, make_batches
from planner.formats.plan import Plan
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import StageModule
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.schedule.instructions import Unit
from planner.workers.job import Job
from planner.workers.place import CPU
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights, delayed_updates, plain_training
from tests.executor.run.test_exactness import BATCH_SIZE, SEED, unsplit

OPTIMIZERS = ("momentum", "adamw")
HEAD = "head.weight"
LINEARS = [f"blocks.{block}.0.weight" for block in range(4)]


def plan_for(
    folder: Path,
    replicas: tuple[int, ...],
    schedule: str,
    microbatches: int = 1,
    chunks: int = 1,
    model: str = "tied",
) -> Plan:
    profile = structural_profile(write_model(folder, model, "sgd"), BATCH_SIZE)
    return make_plan(profile, replicas, schedule, microbatches, chunks=chunks)


def train(
    folder: Path, plan: Plan, minibatches: int, clip: float | None = None, model: str = "tied"
) -> list[tuple[Job, list[float | None], Weights]]:
    """With each optimizer."""
    jobs = []
    for optimizer in OPTIMIZERS:
        path = write_model(folder, model, optimizer)
        weights = str(folder / f"{optimizer}.pt")
        options = TrainingOptions(clip_grad_norm=clip)
        jobs.append(
            Job(
                model=str(path),
                plan=plan,
                steps=minibatches,
                seed=SEED,
                save_weights=weights,
                options=options,
            )
        )
    results = run_jobs(jobs, folder)
    return [
        (
            job,
            [entry.loss for entry in result.losses],
            torch.load(str(job.save_weights), weights_only=True),
        )
        for job, result in zip(jobs, results, strict=True)
    ]


@pytest.mark.parametrize(
    ("schedule", "microbatches", "replicas", "chunks", "clip"),
    [
        pytest.param("1f1b-flush", 4, (2, 1), 1, None, id="1f1b-flush 2-1"),
        pytest.param(
            "gpipe", 3, (1, 1, 1), 1, 0.5, id="gpipe 1-1-1, clipped", marks=pytest.mark.slow
        ),
        pytest.param("zb-h1", 4, (1, 1, 1), 1, None, id="zb-h1 1-1-1", marks=pytest.mark.slow),
        pytest.param(
            "interleaved", 4, (1,) * 4, 2, 0.5, id="interleaved, clipped", marks=pytest.mark.slow
        ),
    ],
)
def test_schedules_that_drain_equal_plain_training(
    schedule: str,
    microbatches: int,
    replicas: tuple[int, ...],
    chunks: int,
    clip: float | None,
    tmp_path: Path,
) -> None:
    plan = plan_for(tmp_path, replicas, schedule, microbatches, chunks)
    assert plan.shared
    for job, losses, weights in train(tmp_path, plan, 6, clip):
        spec = load_model_file(job.model)
        data = make_batches(spec, BATCH_SIZE, microbatches, SEED)

        def microbatch_losses(
            model: nn.Module, minibatch: int, data: BatchSource = data
        ) -> list[Tensor]:
            assert isinstance(model, StageModule)
            found = []
            for microbatch in range(microbatches):
                model.set_random_key(SEED, minibatch, microbatch)
                found.append(model(data.batch(Unit(minibatch, microbatch)), {})["loss"])
            return found

        whole = unsplit(spec)
        expected_losses, expected = plain_training(
            whole, partial(clipped, spec, clip), microbatch_losses, 6
        )
        assert losses == pytest.approx(expected_losses, rel=1e-4), job.model
        for name, tensor in expected.items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=1e-3, atol=1e-5, msg=f"{job.model} {name}"
            )
        assert torch.equal(weights[HEAD], weights["embed.weight"])
        for name in LINEARS:
            assert torch.equal(weights[name], weights[LINEARS[0]])


@pytest.mark.slow
def test_gpt2_trains_as_without_stages(tmp_path: Path) -> None:
    """Three stages, of which the first has the embedding and the last the head."""
    pytest.importorskip("transformers", reason="needs the extra 'hf': pip install transformers")
    plan = plan_for(tmp_path, (1, 1, 1), "1f1b-flush", 4, model="gpt2")
    assert [shared.stages for shared in plan.shared] == [(0, 2)]
    for job, losses, weights in train(tmp_path, plan, 5, model="gpt2"):
        spec = load_model_file(job.model)
        data = make_batches(spec, BATCH_SIZE, 4, SEED)

        def microbatch_losses(
            model: nn.Module, minibatch: int, data: BatchSource = data
        ) -> list[Tensor]:
            assert isinstance(model, StageModule)
            found = []
            for microbatch in range(4):
                model.set_random_key(SEED, minibatch, microbatch)
                found.append(model(data.batch(Unit(minibatch, microbatch)), {})["loss"])
            return found

        expected_losses, expected = plain_training(
            unsplit(spec), spec.optimizer, microbatch_losses, 5
        )
        assert losses == pytest.approx(expected_losses, rel=1e-4), job.model
        for name, tensor in expected.items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=2e-3, atol=2e-5, msg=f"{job.model} {name}"
            )
        assert torch.equal(weights["gpt.lm_head.weight"], weights["gpt.transformer.wte.weight"])


def clipped(
    spec: TrainingSpec, limit: float | None, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Clips before every step."""
    optimizer = spec.optimizer(parameters)

    def clip(*_: object) -> None:
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize(
    ("replicas", "minibatches"),
    [
        pytest.param((1, 1, 1), 8, id="1-1-1"),
        pytest.param(
            (1, 1, 1), 1, id="1-1-1, fewer minibatches than stages", marks=pytest.mark.slow
        ),
        pytest.param((2, 2), 9, id="2-2", marks=pytest.mark.slow),
    ],
)
def test_1f1b_equals_delayed_updates_to_the_bit(
    replicas: tuple[int, ...], minibatches: int, tmp_path: Path
) -> None:
    """A minibatch sees a shared weight at one version in all stages, that of the deepest of
    them.
    """
    plan = plan_for(tmp_path, replicas, "1f1b")
    stage_of = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    for job, losses, weights in train(tmp_path, plan, minibatches):
        # The reference knows of no shared weights: it is given a model of copies, which it steps as
        # one.
        optimizer = Path(job.model).stem.partition("_")[2]
        copies_file = load_model_file(write_model(tmp_path, "copies", optimizer))
        whole = unsplit(copies_file)
        data = make_batches(copies_file, BATCH_SIZE, 1, SEED)

        def forward_loss(model: nn.Module, minibatch: int, data: BatchSource = data) -> Tensor:
            assert isinstance(model, StageModule)
            model.set_random_key(SEED, minibatch, 0)
            loss: Tensor = model(data.batch(Unit(minibatch)), {})["loss"]
            return loss

        profile = structural_profile(Path(copies_file.origin), BATCH_SIZE)
        owner = {
            name: stage_of[layer.name] for layer in profile.layers for name in layer.parameters
        }
        names = [
            [name for name, _ in whole.named_parameters() if owner[name] == s]
            for s in range(len(replicas))
        ]
        losses_expected, expected = delayed_updates(
            whole,
            names,
            replicas,
            copies_file.optimizer,
            forward_loss,
            minibatches,
            copies=[["embed.weight", HEAD], LINEARS],
        )
        assert losses == losses_expected, job.model
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), (job.model, name)


def test_checkpoints_and_deferred_weights_hold_the_copies_equal(tmp_path: Path) -> None:
    """A run that stops and goes on under another plan ends as the one that does not stop."""
    first = plan_for(tmp_path, (1, 1), "1f1b-flush", 2)
    path = write_model(tmp_path, "tied", "adamw")
    folder = str(tmp_path / "checkpoints")

    def job(
        steps: int, plan: Plan, name: str, resume: str | None = None, every: int | None = 3
    ) -> Job:
        return Job(
            model=str(path),
            plan=plan,
            steps=steps,
            seed=SEED,
            defer_weights=True,
            save_weights=str(tmp_path / name),
            checkpoints=CheckpointOptions(
                checkpoint_every=every, checkpoint_folder=folder, resume=resume
            ),
        )

    other = plan_for(tmp_path, (1, 1), "gpipe", 2)
    run_jobs(
        [
            job(3, first, "stopped.pt"),
            job(6, other, "resumed.pt", "auto"),
            job(6, first, "whole.pt", None, None),
        ],
        tmp_path,
    )
    resumed, whole = (
        torch.load(tmp_path / name, weights_only=True) for name in ("resumed.pt", "whole.pt")
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    assert torch.equal(whole[HEAD], whole["embed.weight"])


@pytest.mark.parametrize(
    ("replicas", "schedule", "options", "complaint"),
    [
        ((2, 1), "1f1b", TrainingOptions(), "but under 1f1b update it after 2 and 1 minibatches"),
        (
            (1, 1),
            "1f1b",
            TrainingOptions(clip_grad_norm=1.0),
            "clip their gradients each by its own norm",
        ),
        (
            (1, 1),
            "1f1b",
            TrainingOptions(late_lr=0.3),
            "have learning rates of their own with `late_lr`",
        ),
    ],
)
def test_copies_that_would_differ_are_refused(
    replicas: tuple[int, ...],
    schedule: str,
    options: TrainingOptions,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    path = write_model(tmp_path, "tied", "sgd")
    job = Job(
        model=str(path), plan=plan_for(tmp_path, replicas, schedule), steps=1, options=options
    )
    with pytest.raises(PlanError, match=complaint) as raised:
        pipeline_context(job, load_model_file(path), CPU)
    assert "1f1b-flush" in raised.value.hint
