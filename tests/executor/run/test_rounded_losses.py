"""Comparing losses takes no rounding for another loss, and little time where minibatches have many
parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelFileError
from planner.executor.run.loss_check import LossCheck
from planner.formats.profile import LossMean
from planner.model.batch import Batch
from planner.model.capture.capture import capture_file
from planner.model.options import ModuleOptions
from planner.model.spec import in_memory
from planner.model.stage.whole_output import WholeOutput
from planner.schedule.instructions import Unit


def loss(output: Tensor, advantages: Tensor) -> Tensor:
    """Of a first step of PPO: the ratio is 1, and normalised advantages cancel."""
    logarithms = torch.log_softmax(output, -1)
    ratio = (logarithms - logarithms.detach()).exp()
    return -(ratio.mean(-1) * advantages).mean()


def check_and_output() -> tuple[LossCheck, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(64, 8, generator=generator)
    advantages = torch.randn(64, generator=generator)
    advantages = (advantages - advantages.mean()) / advantages.std()
    example: Any = (torch.zeros(64, 3),), advantages
    spec = in_memory(nn.Linear(3, 8), example_batch=example, loss=loss)
    whole = WholeOutput.of(capture_file(spec, spec.example_batch(64), spec.build_model()))
    assert whole is not None
    options = ModuleOptions(compiled=True)
    check = LossCheck(spec, whole, options, LossMean(over="samples"), None, captured=True, last=200)
    return check, output, advantages


def compare(captured: float) -> None:
    check, output, advantages = check_and_output()
    batch = Batch((torch.zeros(64, 3),), {}, advantages)
    (name,) = check._output.names
    check.see(
        Unit(0), lambda minibatch: [Unit(minibatch)], batch, {name: output}, torch.tensor(captured)
    )
    readings = check.take_readings()
    assert len(readings) == 1
    for numbers, reader in readings:
        reader(numbers)


def test_a_loss_whose_terms_cancel() -> None:
    compare(3e-8)
    with pytest.raises(ModelFileError, match="what it reads has changed since"):
        compare(1e-3)


def test_units_are_listed_for_minibatches_that_are_compared_alone() -> None:
    check, output, advantages = check_and_output()
    listed = []

    def units_of(minibatch: int) -> list[Unit]:
        listed.append(minibatch)
        return [Unit(minibatch, part) for part in range(4)]

    (name,) = check._output.names
    batch = Batch((torch.zeros(64, 3),), {}, advantages)
    for minibatch in range(40):
        for part in range(4):
            check.see(
                Unit(minibatch, part), units_of, batch, {name: output}, loss(output, advantages)
            )
    assert listed == [*range(16), 31]
