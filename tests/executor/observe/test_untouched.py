"""on_update() is called by one worker, and may not change what the others train by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from planner.errors import ModelFileError
from planner.executor.observe.untouched import TrainedState
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from tests.executor import eager
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

SIZE = 4
STEPS = 3


class Part(nn.Module):
    """A stage with weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


@torch.no_grad()
def clamp(part: Part, _: optim.Optimizer) -> None:
    part.linear.weight.clamp_(-0.1, 0.1)


def replace_values(part: Part, _: optim.Optimizer) -> None:
    part.linear.weight.data = part.linear.weight.data.clamp(-0.1, 0.1)


def freeze(part: Part, _: optim.Optimizer) -> None:
    part.linear.weight.requires_grad_(False)


def forget_statistics(part: Part, _: optim.Optimizer) -> None:
    part.norm.reset_running_stats()


def halve_rate(_: Part, optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def drop_momentum(_: Part, optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)


def add_group(_: Part, optimizer: optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def take_a_parameter_out(_: Part, optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


CHANGES: dict[Callable[[Part, optim.Optimizer], None], str] = {
    clamp: "'linear.weight'",
    replace_values: "'linear.weight'",
    freeze: "'linear.weight'",
    forget_statistics: "'norm.running_mean'",
    halve_rate: "`lr` of the optimizer's group 0",
    drop_momentum: "`betas` of the optimizer's group 0",
    add_group: "`params` of the optimizer's group 1",
    take_a_parameter_out: "`params` of the optimizer's group 0",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change: Callable[[Part, optim.Optimizer], None]) -> None:
    part = Part()
    optimizer = optim.AdamW(part.parameters())
    state = TrainedState([part], [optimizer])
    with pytest.raises(ModelFileError) as caught, state.unchanged():
        change(part, optimizer)
    assert caught.value.message.startswith(
        f"on_update() changes {CHANGES[change]}, but one worker alone calls it"
    )


def test_a_rate_that_is_a_tensor_is_noticed_in_either_optimizer() -> None:
    parts = [Part(), Part()]
    optimizers = [optim.AdamW(part.parameters(), lr=torch.tensor(0.1)) for part in parts]
    for optimizer in optimizers:
        with (
            pytest.raises(ModelFileError, match="changes `lr`"),
            TrainedState(parts, optimizers).unchanged(),
        ):
            optimizer.param_groups[0]["lr"].mul_(0.5)


def test_who_only_looks_changes_nothing() -> None:
    part = Part()
    optimizer = optim.AdamW(part.parameters())
    optimizer.param_groups[0]["lr"] = float("nan")  # which is not equal to itself
    with TrainedState([part], [optimizer]).unchanged():
        norms = [parameter.detach().norm() for parameter in part.parameters()]
        rates = [group["lr"] for group in optimizer.param_groups]
    assert len(norms) == len(list(part.parameters()))
    assert len(rates) == 1


MADE = """
OPTIMIZERS = []

def optimizer(parameters):
    OPTIMIZERS.append(torch.optim.SGD(parameters, lr=0.05))
    return OPTIMIZERS[-1]
"""
THROUGH_A_REFERENCE = """
def on_update(minibatch, loss, metrics):
    for group in OPTIMIZERS[-1].param_groups:
        group["lr"] *= 0.5
"""
# The same by the ways out, with weights that are clamped, too.
BY_SCHEDULER_AND_HOOK = """
def clamp(optimizer, args, kwargs):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)

def optimizer(parameters):
    made = torch.optim.SGD(parameters, lr=0.05)
    made.register_step_post_hook(clamp)
    return made

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

def on_update(minibatch, loss, metrics):
    pass
"""


def test_a_rate_that_on_update_changes_ends_a_run_of_two_stages(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "sgd", samples=12, more=MADE + THROUGH_A_REFERENCE)
    plan = make_plan(structural_profile(path, SIZE), (1, 1))
    with pytest.raises(Exception, match=r"on_update\(\) changes `lr` of the optimizer's group 0"):
        eager.run_one(path, plan, TrainingOptions(), steps=STEPS)


def test_one_worker_with_the_whole_model_may(tmp_path: Path) -> None:
    path = write_model(tmp_path, "language", "sgd", samples=12, more=MADE + THROUGH_A_REFERENCE)
    result, _ = eager.run_one(
        path, make_plan(structural_profile(path, SIZE), (1,)), TrainingOptions(), steps=STEPS
    )
    assert len(result.losses) == STEPS


def test_the_ways_out_are_as_one_process(tmp_path: Path) -> None:
    path = write_model(
        tmp_path, "language", "sgd", samples=SIZE * STEPS, more=BY_SCHEDULER_AND_HOOK
    )
    plan = make_plan(structural_profile(path, SIZE // 2), (1, 1), "1f1b-flush", microbatches=2)
    _, weights = eager.run_one(path, plan, TrainingOptions(), steps=STEPS)

    spec = load_model_file(path)
    model = eager.build(spec)
    optimizer = spec.optimizer(list(model.parameters()))
    scheduler = spec.scheduler(optimizer)
    assert scheduler is not None

    def step(optimizer: optim.Optimizer) -> None:
        optimizer.step()
        scheduler.step()

    eager.train(spec, model, eager.minibatches(spec, SIZE, 1)[:STEPS], step, optimizer)
    eager.assert_close(weights, model)
