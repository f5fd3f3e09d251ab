"""optimizer() is called once more than in one process, for the rates of one process: nothing of
that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

from planner.executor.stage.optimizer import StageOptimizer
from planner.model.optimizer_part import trained_parameters
from planner.model.spec import TrainingSpec, in_memory


def halving(parameters: Sequence[nn.Parameter]) -> Optimizer:
    for parameter in parameters:
        parameter.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    return SGD(parameters, lr=0.1)


def scaling(parameters: Sequence[nn.Parameter]) -> Optimizer:
    for parameter in parameters:
        parameter.data.mul_(0.5)
    return SGD(parameters, lr=0.1)


def by_attribute(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """As for models that mark their parameters."""
    marked = [
        parameter for parameter in parameters if getattr(parameter, "_no_weight_decay", False)
    ]
    others = [
        parameter for parameter in parameters if not getattr(parameter, "_no_weight_decay", False)
    ]
    groups: list[dict[str, Any]] = [{"params": marked, "weight_decay": 0.0}, {"params": others}]
    return SGD(groups, lr=0.1, weight_decay=0.1)


def spec_of(optimizer: Callable[..., Optimizer]) -> tuple[TrainingSpec, Any]:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter._no_weight_decay = True
    batch: Any = (torch.zeros(2, 3),), torch.zeros(2)
    return in_memory(model, example_batch=batch, optimizer=optimizer), model


def stage_of(model: Any, number: int) -> nn.Module:
    """Return one layer as a stage, with the names that it has in the model."""
    return nn.ModuleDict({str(number): model[number]})


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a stage"])
def test_hooks_and_changed_weights_count_once(whole: bool) -> None:
    spec, model = spec_of(halving)
    StageOptimizer(spec, model if whole else stage_of(model, 1), whole=trained_parameters(model))
    model[1](torch.ones(1, 3)).sum().backward()
    assert torch.equal(model[1].bias.grad, torch.full((3,), 0.5))

    spec, model = spec_of(scaling)
    before = model[1].weight.detach().clone()
    StageOptimizer(spec, model if whole else stage_of(model, 1), whole=trained_parameters(model))
    assert torch.equal(model[1].weight, before * 0.5)


def test_groups_by_attributes_of_parameters_are_alike_on_all_stages() -> None:
    spec, model = spec_of(by_attribute)
    whole = trained_parameters(model)
    stages = [StageOptimizer(spec, stage_of(model, number), whole=whole) for number in range(2)]
    assert stages[0].groups_digest == stages[1].groups_digest
    for stage, layer in zip(stages, model, strict=True):
        assert stage.optimizer is not None
        groups = [group["params"] for group in stage.optimizer.param_groups]
        assert groups == [[layer.bias], [layer.weight]]


def test_state_that_is_there_before_the_first_step() -> None:
    spec, model = spec_of(lambda parameters: Adagrad(parameters, lr=0.1))
    optimizer = StageOptimizer(spec, model).optimizer
    assert optimizer is not None
    assert len(optimizer.state) == len(list(model.parameters()))
