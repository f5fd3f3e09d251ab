"""Loss scaling against plain loops under autocast, with and without overflows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from planner.executor.stage.optimizer import BACKOFF, FIRST_SCALE, LossScaler
from planner.model.options import ModuleOptions, autocasting
from planner.model.spec import load_model_file
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.workers.job import Job
from tests.executor import eager
from tests.executor.eager import Case
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_jobs
from tests.executor.rounds import delayed_rounds

SAMPLES, EPOCHS = 24, 2
FLOAT16 = ModuleOptions(torch.float16)

# The loss is so large that the first scales overflow.
STEEP = """
def loss(output, target):
    return 200 * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-4)
"""


def test_float16_trains_with_scaled_losses(tmp_path: Path) -> None:
    gentle = write_model(tmp_path, "language", "momentum", samples=SAMPLES)
    steep = write_model(tmp_path, "language", "sgd", samples=SAMPLES, more=STEEP)
    options = TrainingOptions(clip_grad_norm=0.5)
    cases = [
        Case(
            gentle,
            make_plan(structural_profile(gentle, 4, FLOAT16), (1, 1)),
            options,
            epochs=EPOCHS,
        ),
        Case(
            steep,
            make_plan(structural_profile(steep, 4, FLOAT16), (1, 1), "1f1b-flush", 2),
            epochs=EPOCHS,
        ),
        Case(steep, make_plan(structural_profile(steep, 4, FLOAT16), (1, 1)), epochs=EPOCHS),
    ]
    assert {case.plan.autocast for case in cases} == {"float16"}
    outcomes = eager.run_cases(cases)
    assert_asynchronous_to_the_bit(cases[0], *outcomes[0])
    assert_synchronous_leaves_out_the_same(cases[1], *outcomes[1])
    result, weights = outcomes[2]
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    losses = [entry.loss for entry in result.losses]
    assert None not in losses
    assert losses[-1] < losses[0]  # type: ignore[operator]


def assert_asynchronous_to_the_bit(
    case: Case, result: object, weights: dict[str, torch.Tensor]
) -> None:
    """Without an overflow the scale never changes; gradients are unscaled before clipping."""
    spec = load_model_file(case.path)
    batches = eager.minibatches(spec, 4, EPOCHS)

    def forward_loss(model: nn.Module, minibatch: int) -> torch.Tensor:
        with autocasting("cpu", torch.float16):
            return eager.loss_of(spec, model, batches[minibatch]) * FIRST_SCALE

    def step(optimizer: Optimizer, parameters: list[nn.Parameter], _: int) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= FIRST_SCALE
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()

    names = eager.stage_names(structural_profile(case.path, 4, FLOAT16), case.plan)
    losses, expected = delayed_rounds(
        eager.build(spec), names, (1, 1), (2, 1), spec.optimizer, forward_loss, len(batches), step
    )
    found = [entry.loss for entry in result.losses]  # type: ignore[attr-defined]
    assert found == [loss / FIRST_SCALE for loss in losses]
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def assert_synchronous_leaves_out_the_same(
    case: Case, result: object, weights: dict[str, torch.Tensor]
) -> None:
    """An overflow anywhere skips the update everywhere, and halves the scale."""
    spec = load_model_file(case.path)
    model = eager.build(spec)
    optimizer = spec.optimizer(list(model.parameters()))
    scale, skipped, losses = FIRST_SCALE, 0, []
    for batch in eager.minibatches(spec, 8, EPOCHS):
        optimizer.zero_grad()
        total = 0.0
        for part in batch.split(2):
            with autocasting("cpu", torch.float16):
                loss = eager.loss_of(spec, model, part) / 2
            torch.autograd.backward(loss * scale)
            total += float(loss.detach())
        losses.append(total)
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            for gradient in gradients:
                gradient /= scale
            optimizer.step()
        else:
            scale, skipped = scale * BACKOFF, skipped + 1
    assert 0 < skipped < len(losses), "some updates overflow, and some do not"
    found = [entry.loss for entry in result.losses]  # type: ignore[attr-defined]
    assert found == pytest.approx(losses, rel=1e-3)
    eager.assert_close(weights, model)


def test_the_scale_grows_after_a_while_without_overflow() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3)
    for finite, expected in [
        (True, 8),
        (True, 8),
        (False, 4),
        (True, 4),
        (True, 4),
        (True, 8),
        (True, 8),
    ]:
        scaler.update(finite)
        assert scaler.scale == expected
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert math.log2(FIRST_SCALE).is_integer()


# The last stage has no trained weights, and its first scales overflow, too.
FROZEN_HEAD = """
def build_model(build=build_model):
    model = build()
    *_, last = (each for each in model.modules() if isinstance(each, nn.Linear))
    last.requires_grad_(False)
    return model
"""


def test_a_stage_without_trained_weights_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "sgd", samples=SAMPLES, more=STEEP + FROZEN_HEAD)
    profile = structural_profile(path, 4, FLOAT16)
    plan = make_plan(profile, (1, 1), "1f1b-flush", 2)
    whole = Job(model=str(path), plan=plan, steps=12)
    jobs = [
        whole.model_copy(
            update={
                "steps": steps,
                "checkpoints": CheckpointOptions(
                    checkpoint_every=6,
                    checkpoint_folder=str(tmp_path / "checkpoints"),
                    resume=resume,
                ),
            }
        )
        for steps, resume in ((6, None), (12, "auto"))
    ]

    expected, _, resumed = run_jobs([whole, *jobs], tmp_path)
    assert [each.loss for each in resumed.losses] == [each.loss for each in expected.losses][6:]
