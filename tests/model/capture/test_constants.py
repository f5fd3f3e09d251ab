"""Looks at values of tensors that a forward makes from numbers alone, which the tracer answers; and
at others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Chi2, Distribution, Normal, StudentT
from torch.nn import functional as F

from planner.errors import CaptureError
from planner.model.batch import Batch
from planner.model.capture.capture import capture
from planner.model.capture.other_sizes import OtherSizes
from tests.model.splitting import assert_same, cut_evenly, run_model, run_split

WIDTH = 6
Forward = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = forward

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self.first(x)))
        return result


def batch_of(size: int) -> Batch:
    return Batch((torch.randn(size, WIDTH),), {}, torch.randn(size, WIDTH))


def list_of_dimensions(x: Tensor) -> Tensor:
    return x - x.sum(torch.arange(1, x.ndim).tolist(), keepdim=True)


def mask_written_in_part(x: Tensor) -> Tensor:
    mask = torch.ones(WIDTH, WIDTH).tril()
    mask[0] = 1
    return x * 2 if mask.bool()[0].all() else x @ mask


def written_through_a_view(x: Tensor) -> Tensor:
    counts = torch.zeros(4)
    counts[1:].fill_(3.0)
    return x * 2 if counts.sum() == 9 and not counts[0] else x.sin()


def number_of_a_schedule(x: Tensor) -> Tensor:
    rates = [float(rate) for rate in torch.linspace(0, 1, 5)]
    return x * rates[3] + int(torch.tensor([3.0, 4.0]).norm())


KNOWN = [list_of_dimensions, mask_written_in_part, written_through_a_view, number_of_a_schedule]


@pytest.mark.parametrize("forward", KNOWN)
def test_what_is_made_of_numbers_may_be_looked_at(forward: Forward) -> None:
    batch = batch_of(4)
    graph = capture(Net(forward), batch, F.mse_loss)
    assert_same(
        run_model(graph, batch, F.mse_loss), run_split(graph, batch, cut_evenly(graph, 3), None)
    )
    assert OtherSizes(graph, F.mse_loss, batch).problem(batch_of(3)) is None


def the_batch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def the_batch_in_a_part(x: Tensor) -> Tensor:
    mixed = torch.zeros(WIDTH)
    mixed[2:] = x[0, 2:]
    return x * 2 if mixed.sum() > 0 else x


def the_batch_through_a_view(x: Tensor) -> Tensor:
    mixed = torch.zeros(WIDTH)
    mixed[2:].copy_(x[0, 2:])
    return x * 2 if mixed[3] > 0 else x


def the_batch_in_data(x: Tensor) -> Tensor:
    mixed = torch.zeros(WIDTH)
    mixed.data.copy_(x[0])
    return x * 2 if mixed[3] > 0 else x


def the_batch_as_data(x: Tensor) -> Tensor:
    mixed = torch.zeros(WIDTH)
    mixed.data = x[0]
    return x * 2 if mixed[3] > 0 else x


def the_batch_size(x: Tensor) -> Tensor:
    return x * 2 if torch.arange(x.shape[0])[-1] > 2 else x


def random_numbers(x: Tensor) -> Tensor:
    return x * 2 if torch.rand(()) > 0.5 else x


def random_numbers_in_place(x: Tensor) -> Tensor:
    numbers = torch.zeros(3)
    first = numbers[:1]
    numbers.uniform_()
    return x * 2 if first > 0.5 else x


def memory_as_it_was(x: Tensor) -> Tensor:
    return x * 2 if torch.empty(()) > 0.5 else x


UNKNOWN = [
    the_batch,
    the_batch_in_a_part,
    the_batch_through_a_view,
    the_batch_in_data,
    the_batch_as_data,
    the_batch_size,
    random_numbers,
    random_numbers_in_place,
    memory_as_it_was,
]


@pytest.mark.parametrize("forward", UNKNOWN)
def test_what_depends_on_more_may_not(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Net(forward), batch_of(4), F.mse_loss)


def student_t(output: Tensor, target: Tensor) -> Tensor:
    """It makes a Chi2, which looks at its argument, whatever StudentT was told."""
    distribution = StudentT(4.0, output, 1.0, validate_args=False)
    likelihood: Tensor = distribution.log_prob(target)  # type: ignore[no-untyped-call]
    return -likelihood.mean()


def normal(output: Tensor, target: Tensor) -> Tensor:
    distribution = Normal(output, F.softplus(output))
    likelihood: Tensor = distribution.log_prob(target)  # type: ignore[no-untyped-call]
    return -likelihood.mean()


@pytest.mark.parametrize("loss", [student_t, normal])
def test_distributions_do_not_check(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    batch = batch_of(4)
    graph = capture(Net(torch.tanh), batch, loss)
    assert_same(run_model(graph, batch, loss), run_split(graph, batch, cut_evenly(graph, 3), None))
    assert OtherSizes(graph, loss, batch).problem(batch_of(3)) is None

    assert Distribution._validate_args
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        Chi2(torch.tensor(-1.0))
