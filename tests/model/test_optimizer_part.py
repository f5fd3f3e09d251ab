"""A part's optimizer has the groups, and so the rates, that the whole model's has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, lr_scheduler

from planner.errors import ModelFileError
from planner.model.optimizer_part import (
    check_scheduler,
    optimizer_of_part,
    step_part,
    trained_parameters,
)
from planner.model.spec import TrainingSpec, in_memory

DEPTH = 4
Make = Callable[[Optimizer], Any]


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(DEPTH)))


def spec_of(optimizer: Callable[..., Optimizer], scheduler: Make | None = None) -> TrainingSpec:
    batch = (torch.zeros(2, 4),), torch.zeros(2)
    return in_memory(stack(), example_batch=batch, optimizer=optimizer, scheduler=scheduler)


def by_depth(named_parameters: Any) -> Optimizer:
    """Layer-wise rates, by name."""
    named = list(named_parameters)
    groups = [
        {
            "params": [p for n, p in named if n.startswith(f"{depth}.")],
            "lr": 0.1 * 0.7**depth,
            "momentum": 0.8,
        }
        for depth in range(DEPTH)
    ]
    return SGD(groups, lr=0.1)


def by_place(parameters: Any) -> Optimizer:
    """The first half of the list learns slowly; matrices decay."""
    half = len(parameters) // 2
    slow, fast = parameters[:half], parameters[half:]
    groups = [
        {"params": [p for p in slow if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for p in slow if p.ndim < 2], "lr": 0.01, "weight_decay": 0.0},
        {"params": [p for p in fast if p.ndim > 1], "lr": 0.1, "weight_decay": 0.1},
        {"params": [p for p in fast if p.ndim < 2], "lr": 0.1, "weight_decay": 0.0},
    ]
    return SGD(groups, lr=0.1, momentum=0.9)


def chained(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.ChainedScheduler([warm, lr_scheduler.ExponentialLR(optimizer, 0.8)])


def sequential(optimizer: Optimizer) -> lr_scheduler.SequentialLR:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [3]
    )


def warming(slow: int, step: int) -> float:
    return min(1.0, (step + 1) / slow)


def falling(by: int, step: int) -> float:
    return 1 - 0.1 * by


SCHEDULERS: dict[str, Make] = {
    "a function for each group": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [partial(warming, index + 2) for index in range(4)]
    ),
    "a factor for each group": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, [partial(falling, index) for index in range(4)]
    ),
    "one cycle, with momentum": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.1, 0.2, 0.3, 0.4], total_steps=12
    ),
    "cycles, with momentum": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, [0.01] * 4, [0.1, 0.2, 0.3, 0.4], step_size_up=3
    ),
    "sequential": sequential,
    "chained": chained,
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
}


def values_by_name(
    optimizer: Optimizer, names: dict[nn.Parameter, str]
) -> dict[str, tuple[Any, ...]]:
    """Return rate, momentum and decay of each parameter."""
    return {
        names[parameter]: tuple(group[key] for key in ("lr", "momentum", "weight_decay"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("groups", [by_depth, by_place])
def test_each_parameter_has_the_rates_of_one_process(
    groups: Callable[..., Optimizer], name: str
) -> None:
    model = stack()
    spec, whole = spec_of(groups, SCHEDULERS[name]), trained_parameters(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    alone = spec.optimizer(dict(model.named_parameters()))
    optimizers = [alone]
    for layers in ("0", "12", "3"):
        part = {name: each for name, each in model.named_parameters() if name[0] in layers}
        optimizers.append(optimizer_of_part(spec, whole, part))
    schedulers = [spec.scheduler(optimizer) for optimizer in optimizers]

    for _ in range(10):
        expected = values_by_name(alone, names)
        found: dict[str, tuple[Any, ...]] = {}
        for optimizer in optimizers[1:]:
            own = values_by_name(optimizer, names)
            assert not own.keys() & found.keys()
            found |= own
        assert found == expected
        for scheduler in schedulers:
            assert scheduler is not None
            scheduler.step()


def test_state_from_before_the_first_step_is_of_the_part_alone() -> None:
    model = stack()
    part = {name: each for name, each in model.named_parameters() if name.startswith("1.")}
    optimizer = optimizer_of_part(spec_of(Adagrad), trained_parameters(model), part)
    assert set(optimizer.state) == set(part.values())


def test_names_of_parameters_stay_with_them() -> None:
    model = stack()
    part = {name: each for name, each in model.named_parameters() if name.startswith("1.")}
    named = spec_of(lambda named_parameters: AdamW(named_parameters))
    optimizer = optimizer_of_part(named, trained_parameters(model), part)
    assert optimizer.param_groups[0]["param_names"] == list(part)


def test_tied_parameters_have_any_of_their_names() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    whole = trained_parameters(model)
    assert [each.aliases for each in whole] == [("0.weight", "1.weight"), ("0.bias",), ("1.bias",)]
    last = {f"1.{name}": each for name, each in second.named_parameters()}
    optimizer = optimizer_of_part(spec_of(AdamW), whole, last)
    assert optimizer.param_groups[0]["params"] == [first.weight, second.bias]


def test_a_part_of_which_optimizer_trains_nothing_steps_nothing() -> None:
    model = stack()
    head = spec_of(
        lambda named_parameters: SGD([p for n, p in named_parameters if n.startswith("3.")], lr=0.1)
    )
    first = {name: each for name, each in model.named_parameters() if name.startswith("0.")}
    optimizer = optimizer_of_part(head, trained_parameters(model), first)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("it has nothing to step"))
    step_part(head, optimizer)
    assert [group["params"] for group in optimizer.param_groups] == [[]]


class NeedsEpoch(lr_scheduler.ConstantLR):
    def step(self, epoch: Any = None) -> None:
        if epoch is None and self._step_count:
            raise TypeError("which epoch?")
        super().step()


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau, "a scheduler that follows the number of steps alone"),
        (
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0] * 3),
            "Expected 4 lr_lambdas, but got 3",
        ),
        (NeedsEpoch, r"returned NeedsEpoch, whose step\(\) raises TypeError: which epoch\?"),
        (lambda optimizer: None, "not a scheduler"),
    ],
)
def test_schedulers_that_stages_cannot_follow_are_refused(scheduler: Make, message: str) -> None:
    spec = spec_of(by_depth, scheduler)
    with pytest.raises(ModelFileError, match=message):
        check_scheduler(spec, trained_parameters(stack()))
