"""Calls that a tracer fails at with words of its own are refused with the user's line and a way
out, which works.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError
from planner.model.capture.capture import capture_file
from planner.model.options import PLAIN
from planner.model.spec import TrainingSpec, in_memory
from planner.model.stage.capture_check import check_captured


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)))


def spec_of(model: nn.Module, **more: Any) -> TrainingSpec:
    torch.manual_seed(0)
    example = (torch.randn(4, 6),), torch.randint(0, 5, (4,))
    return in_memory(model, example_batch=example, **({"loss": F.cross_entropy} | more))


def check(spec: TrainingSpec) -> None:
    batch = spec.example_batch(4)
    check_captured(spec, capture_file(spec, batch), [batch], PLAIN)


OWN = torch.Generator().manual_seed(0)


class Noisy(Net):
    generator: torch.Generator | None = OWN

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


class Shuffled(Net):
    """Makes in each call what is the same in every call."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x[:, torch.randperm(6, generator=torch.Generator().manual_seed(0))])


class Ordinary(Noisy):
    generator = None


@pytest.mark.parametrize("model", [Noisy, Shuffled])
def test_a_generator_of_the_models_own(model: type[nn.Module]) -> None:
    with pytest.raises(
        CaptureError, match=r"drawn from a torch.Generator at .*test_untraced_calls.py:\d+"
    ) as error:
        check(spec_of(model()))
    assert "leave out generator=..." in error.value.hint
    check(spec_of(Ordinary()))


def penalty(output: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
    return gradient.pow(2).mean()


class Penalised(Net):
    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        output = super().forward(x)
        return output, penalty(output, x)


class GivesInput(Net):
    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return super().forward(x), x


def with_penalty(output: Any, target: Tensor) -> Tensor:
    total: Tensor = F.cross_entropy(output[0], target) + output[1]
    return total


def penalised(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + penalty(*output)


@pytest.mark.parametrize(("model", "loss"), [(Penalised, with_penalty), (GivesInput, penalised)])
def test_gradients_within_forward_or_loss(model: type[nn.Module], loss: Any) -> None:
    with pytest.raises(
        CaptureError,
        match=r"takes gradients at .*test_untraced_calls.py:\d+, by torch.autograd.grad",
    ):
        check(spec_of(model(), loss=loss))


def test_a_block_takes_gradients() -> None:
    check(spec_of(Penalised(), loss=with_penalty, blocks=lambda model: [model]))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = (
            nn.Parameter(torch.randn(6, 8, dtype=torch.complex64)),
            nn.Linear(8, 5),
        )

    def forward(self, x: Tensor) -> Any:
        return self.head((x.to(torch.complex64) @ self.weight).abs())


def test_gradients_of_complex_weights_are_compared_whole() -> None:
    """A cast to real numbers would lose the imaginary part, with a warning, which is an
    error here.
    """
    check(spec_of(Complex()))


class Counting(Net):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 1000 else 0.5)


COUNT = [0]


def counting(output: Tensor, target: Tensor) -> Tensor:
    COUNT[0] += 1
    return F.cross_entropy(output, target) * (1.0 if COUNT[0] < 1000 else 0.5)


@pytest.mark.parametrize(
    ("spec", "name"), [(spec_of(Counting()), "calls"), (spec_of(Net(), loss=counting), "COUNT")]
)
def test_a_count_of_calls_that_matters_late(spec: TrainingSpec, name: str) -> None:
    with pytest.raises(
        CaptureError, match=f"each call of the model and of loss\\(\\) changes '{name}"
    ) as error:
        check(spec)
    assert "count in a buffer" in error.value.hint
