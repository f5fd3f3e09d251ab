"""Optimizers that combine parameters are told by what they do, whatever they are called and say of
themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from planner.errors import ModelFileError
from planner.model.optimizer_part import optimizer_of_part, trained_parameters
from planner.model.separable import Separability, halves, schedule_problem, separability
from planner.model.spec import TrainingSpec, in_memory
from planner.profiler.step.counters import fake_group
from tests.model import optimizers as people

CPU = torch.device("cpu")
SMALL = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
APART: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda parameters: optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adagrad": optim.Adagrad,
    "AdamW": lambda parameters: optim.AdamW(parameters, amsgrad=True),
    "fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: optim.Adam(parameters, foreach=True),
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "Rprop": optim.Rprop,
    "Adafactor": optim.Adafactor,  # combines within one parameter alone
    "LAMB": lambda parameters: people.Lamb(parameters, max_grad_norm=None),
    "Muon": lambda parameters: optim.Muon([each for each in parameters if each.ndim == 2]),
}


def spec_of(optimizer: Callable[[Any], optim.Optimizer], model: nn.Module = SMALL) -> TrainingSpec:
    return in_memory(
        model, example_batch=((torch.zeros(2, 6),), torch.zeros(2)), optimizer=optimizer
    )


def tried(
    optimizer: Callable[[Any], optim.Optimizer],
    model: nn.Module = SMALL,
    *,
    by_elements: bool = False,
) -> Separability:
    whole = trained_parameters(model)
    ways = halves([each.name for each in whole])
    return separability(spec_of(optimizer, model), whole, ways, CPU, by_elements=by_elements)


@pytest.mark.parametrize("name", APART)
def test_parameters_that_are_updated_by_themselves(name: str) -> None:
    assert tried(APART[name]).problem is None


@pytest.mark.parametrize("name", people.COMBINING)
def test_parameters_that_are_combined(name: str) -> None:
    found = tried(people.COMBINING[name])
    assert found.combines
    assert found.problem is not None
    assert found.problem.startswith("combines parameters: the update of '")


def test_groups_that_stages_do_not_divide_may_have_norms() -> None:
    def by_layer(named_parameters: Any) -> optim.Optimizer:
        named = list(named_parameters)
        return people.NormalisedGroups(
            [{"params": [p for n, p in named if n[0] == layer]} for layer in "02"]
        )

    whole = trained_parameters(SMALL)
    layers = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert separability(spec_of(by_layer), whole, [layers], CPU).problem is None
    assert separability(spec_of(by_layer), whole, [[["0.weight"], ["0.bias"]]], CPU).combines


def test_elements_are_tried_where_an_optimizer_says_they_may() -> None:
    found = tried(people.FalselyElementwise, by_elements=True)
    assert found.combines  # and already without, by its clipping
    without = partial(people.FalselyElementwise, max_grad_norm=None)
    assert tried(without).problem is None
    assert str(tried(without, by_elements=True).problem).startswith(
        "combines elements of parameters"
    )
    assert tried(optim.AdamW, by_elements=True).problem is None
    assert tried(optim.Adagrad, by_elements=True).problem is None
    # refused elsewhere: it does not say that
    assert tried(optim.Adafactor, by_elements=True).problem is None


def test_random_numbers_are_told_and_generators_kept() -> None:
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    found = tried(people.Noisy)
    assert found.draws
    assert not found.claimed
    assert tried(people.NoisyBySelf).claimed
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@contextmanager
def among_two() -> Iterator[None]:
    with fake_group(2):
        yield
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", [people.Averaging, people.Gathering])
def test_communication_is_told_before_it_happens(kind: Any) -> None:
    with (
        among_two(),
        pytest.raises(ModelFileError, match=f"{kind.__name__} communicates with other processes"),
    ):
        tried(kind)


def test_one_that_communicates_only_among_others_is_alone_as_it_is() -> None:
    assert tried(people.Averaging).problem is None


def test_what_fails_on_a_part_is_not_shown() -> None:
    found = tried(people.Particular)
    assert not found.combines
    assert found.problem == (
        "fails on a part of the parameters: step() of Particular raises AssertionError: all four, "
        "please"
    )


def test_what_fails_on_the_whole_is_an_error() -> None:
    three = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3, bias=False))
    with pytest.raises(ModelFileError, match=r"step\(\) of Particular raises AssertionError"):
        tried(people.Particular, three)


def test_large_models_are_tried_on_small_parameters() -> None:
    large = nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 3))
    assert tried(optim.AdamW, large).problem is None
    assert tried(people.Lamb, large).combines

    def of_the_largest(parameters: Any) -> optim.Optimizer:
        assert max(each.numel() for each in parameters) == 700 * 900
        return optim.AdamW(parameters)

    found = tried(of_the_largest, large)
    assert not found.combines
    assert str(found.problem).startswith("fails on smaller parameters of the same names")


class OfNorm(optim.lr_scheduler.LRScheduler):
    """A rate from the norm of all weights."""

    def get_lr(self) -> list[float | torch.Tensor]:
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        return [
            0.01 * sum(float(each.detach().norm()) for each in parameters) for _ in self.base_lrs
        ]


class OfGradients(optim.lr_scheduler.LRScheduler):
    """A rate that falls from the third step on where gradients are large, as this optimizer sees
    them.
    """

    def get_lr(self) -> list[float | torch.Tensor]:
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        norm = sum(float(each.grad.norm()) for each in parameters if each.grad is not None)
        return [0.1 / (1 + norm) if self.last_epoch > 2 else 0.1 for _ in self.base_lrs]


def schedule_seen(
    scheduler: Callable[[optim.Optimizer], Any], *, by_elements: bool = False
) -> str | None:
    batch = (torch.zeros(2, 6),), torch.zeros(2)
    spec = in_memory(SMALL, example_batch=batch, optimizer=optim.AdamW, scheduler=scheduler)
    whole = trained_parameters(SMALL)
    ways = [] if by_elements else halves([each.name for each in whole])
    return schedule_problem(spec, whole, ways, CPU, by_elements=by_elements)


@pytest.mark.parametrize("by_elements", [False, True])
@pytest.mark.parametrize(("scheduler", "steps"), [(OfNorm, "1 step"), (OfGradients, "3 steps")])
def test_schedulers_that_look_at_parameters(
    scheduler: Any, steps: str, *, by_elements: bool
) -> None:
    problem = schedule_seen(scheduler, by_elements=by_elements)
    assert problem is not None
    assert "another `lr` where it sees a part of the parameters alone" in problem
    assert problem.endswith(f"after {steps}")


@pytest.mark.parametrize("by_elements", [False, True])
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
        lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3),
        lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ],
    ids=["steps", "warm-up from 0", "one cycle of three steps", "cosine"],
)
def test_schedulers_that_follow_steps_alone(scheduler: Any, *, by_elements: bool) -> None:
    assert schedule_seen(scheduler, by_elements=by_elements) is None


def with_a_rate_of_values(parameters: Any) -> optim.Optimizer:
    weights = list(parameters)
    return optim.SGD(weights, lr=0.1 * float(weights[0].detach().norm()))


def sparse(parameters: Any) -> optim.Optimizer:
    return optim.SparseAdam(list(parameters), lr=0.1)


def test_a_rate_that_follows_from_values_is_refused() -> None:
    """A stage has the values of its own parameters alone."""
    whole = trained_parameters(SMALL)
    last = dict([*SMALL.named_parameters()][-1:])
    with pytest.raises(
        ModelFileError, match=r"optimizer\(\) reads the values of parameters at"
    ) as error:
        optimizer_of_part(spec_of(with_a_rate_of_values), whole, last)
    assert "give the optimizer numbers" in error.value.hint


def test_dense_gradients_are_no_sparse_ones() -> None:
    with pytest.raises(ModelFileError, match="does not support dense gradients") as error:
        tried(sparse)
    assert "torch.optim.Adam" in error.value.hint
