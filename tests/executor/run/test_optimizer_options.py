"""Learning-rate schedules, clipping and accumulation, against plain loops."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import InputError, ModelFileError
from planner.executor.stage.optimizer import StageOptimizer
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from tests.executor import eager
from tests.executor.eager import Case
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.rounds import Step, delayed_rounds

SAMPLES = 42  # ten minibatches of 4 and one of 2
CLIP = 0.3

SCHEDULE = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
"""

# Weight decay for matrices, but not for parameters named norm or bias.
GROUPS = """
def optimizer(named_parameters):
    plain = [p for name, p in named_parameters if "norm" in name or name.endswith("bias")]
    decayed = [p for name, p in named_parameters if not ("norm" in name or name.endswith("bias"))]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
"""


def clip_and_follow(
    scheduled: dict[int, torch.optim.lr_scheduler.LRScheduler], clip: float | None
) -> Step:
    """Clip a stage's gradients, step, then let the schedule follow the minibatches."""

    def step(optimizer: Optimizer, parameters: list[nn.Parameter], minibatches: int) -> None:
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        for _ in range(minibatches):
            scheduled[id(optimizer)].step()

    return step


def assert_delayed(
    case: Case, replicas: tuple[int, ...], outcome: tuple[object, dict[str, Tensor]]
) -> None:
    """Equal, to the bit, to delayed rounds whose gradients are clipped per stage."""
    spec, options = load_model_file(case.path), case.options
    batches = eager.minibatches(spec, 4, 1)
    scheduled: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}
    stages = iter(zip(replicas, case.plan.stages, strict=True))

    def make_optimizer(parameters: dict[str, nn.Parameter]) -> Optimizer:
        optimizer = spec.optimizer(parameters)
        size, stage = next(stages)
        factor = (size if options.scale_lr else 1) / (1 + options.late_lr * (stage.in_flight - 1))
        for group in optimizer.param_groups:
            group["lr"] *= factor
        scheduler = spec.scheduler(optimizer)
        assert scheduler is not None
        scheduled[id(optimizer)] = scheduler
        return optimizer

    losses, expected = delayed_rounds(
        eager.build(spec),
        eager.stage_names(structural_profile(case.path, 4), case.plan),
        replicas,
        [stage.in_flight for stage in case.plan.stages],
        make_optimizer,
        lambda model, minibatch: eager.loss_of(spec, model, batches[minibatch]),
        len(batches),
        clip_and_follow(scheduled, options.clip_grad_norm),
    )
    result, weights = outcome
    assert [entry.loss for entry in result.losses] == losses  # type: ignore[attr-defined]
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def assert_plain(case: Case, microbatches: int, outcome: tuple[object, dict[str, Tensor]]) -> None:
    """Equal, to rounding, to plain training whose gradients are clipped together."""
    spec = load_model_file(case.path)
    model = eager.build(spec)
    optimizer = spec.optimizer(dict(model.named_parameters()))
    scheduler = spec.scheduler(optimizer)
    assert scheduler is not None
    norms = []

    def step(optimizer: Optimizer) -> None:
        assert case.options.clip_grad_norm is not None
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.options.clip_grad_norm))
        )
        optimizer.step()
        scheduler.step()

    losses = eager.train(spec, model, eager.minibatches(spec, 4 * microbatches, 1), step, optimizer)
    assert max(norms) > CLIP, "clipping must matter"
    result, weights = outcome
    found = [entry.loss for entry in result.losses]  # type: ignore[attr-defined]
    assert found == pytest.approx(losses, rel=1e-4)
    eager.assert_close(weights, model)


@pytest.mark.parametrize(
    ("replicas", "flush"),
    [
        pytest.param((1, 1), "1f1b-flush", id="1-1"),
        pytest.param((2, 1), "gpipe", id="2-1", marks=pytest.mark.slow),
    ],
)
def test_schedules_and_clipping(replicas: tuple[int, ...], flush: str, tmp_path: Path) -> None:
    more = SCHEDULE + GROUPS
    path = write_model(tmp_path, "language", "momentum", samples=SAMPLES, more=more)
    profile = structural_profile(path, 4)
    plain, rounds = (
        make_plan(profile, replicas),
        TrainingOptions(clip_grad_norm=CLIP, scale_lr=True),
    )
    synchronous = make_plan(profile, replicas, flush, 2)
    cases = [
        Case(path, plain, TrainingOptions(clip_grad_norm=CLIP, late_lr=0.3), epochs=1),
        Case(path, plain, rounds, epochs=1),
        # nothing is late
        Case(path, synchronous, TrainingOptions(clip_grad_norm=CLIP, late_lr=0.3), epochs=1),
    ]
    first, second, third = eager.run_cases(cases)
    assert_delayed(cases[0], replicas, first)
    assert_delayed(cases[1], replicas, second)
    assert_plain(cases[2], 2, third)


def test_a_scheduler_that_needs_the_loss_is_refused(tmp_path: Path) -> None:
    more = (
        "\ndef scheduler(optimizer):\n    return "
        "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
    )
    spec = load_model_file(write_model(tmp_path, "language", "sgd", more=more))
    optimizer = spec.optimizer([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ModelFileError, match=r"scheduler\(\) at .* returned a ReduceLROnPlateau"):
        spec.scheduler(optimizer)


ABSOLUTE = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
"""


def test_rates_that_a_scheduler_sets_itself_cannot_be_scaled(tmp_path: Path) -> None:
    """`late_lr` and `scale_lr` multiply the rates of optimizer()."""
    path = write_model(tmp_path, "convolutional", "momentum", samples=SAMPLES, more=ABSOLUTE)
    spec = load_model_file(str(path))
    optimizer = partial(StageOptimizer, spec, spec.build_model())
    optimizer()
    with pytest.raises(InputError, match="OneCycleLR, which scheduler"):
        optimizer(learning_rate_factor=0.25)
