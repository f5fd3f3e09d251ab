"""Which optimizers may step parts of a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from planner.model.elementwise import has_divisible_optimizer, is_elementwise
from planner.model.spec import in_memory


class Lion(SGD):
    """Another optimizer that says of itself what it is."""

    elementwise = True


class Other(AdamW):
    """Nobody knows what it does."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (SGD, True),
        (AdamW, True),
        (Adagrad, True),
        (Lion, True),
        (Other, False),
        (torch.optim.Adafactor, False),
    ],
)
def test_only_known_optimizers_and_those_that_say_so_are_elementwise(
    kind: Any, expected: bool
) -> None:
    optimizer: Optimizer = kind([nn.Parameter(torch.zeros(3, 3))], lr=0.1)
    assert is_elementwise(optimizer) is expected


def test_what_an_object_says_counts_more() -> None:
    optimizer: Any = AdamW([nn.Parameter(torch.zeros(3))])
    optimizer.elementwise = False
    assert not is_elementwise(optimizer)


def test_a_model_without_trained_parameters_has_none() -> None:
    model = nn.Linear(2, 2)
    spec = in_memory(model, example_batch=((torch.zeros(1, 2),), None))
    assert has_divisible_optimizer(spec, model) is True
    assert has_divisible_optimizer(spec, model.requires_grad_(False)) is None
