"""A graph that is captured on one batch, on batches of other sizes: the same as the model, or a
reason why not.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    mse_loss,
    scaled_dot_product_attention,
)

import planner
from planner.model.capture.capture import capture_file
from planner.model.capture.other_sizes import OtherSizes
from planner.model.capture.pins import warn_of_only_size

CAPTURED, WIDTH = 4, 8


class Sized(nn.Module):
    """Two layers, and between them what depends on the number of samples."""

    def __init__(self, between: Callable[[Tensor], Tensor], out: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = between
        self.last = nn.Linear(WIDTH, out)
        self.register_buffer("table", torch.randn(CAPTURED, WIDTH))

    def forward(self, x: Tensor, *_: Tensor) -> Any:
        return self.last(self.between(self.first(x)))


class SideTable(Sized):
    """Only the second input meets a table of one batch size."""

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return super().forward(x), others[0] + self.get_buffer("table")


class Mixed(nn.Module):
    """What people use, and what leaves other operations in a graph than a model runs: slices,
    scripts, recurrence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.encoder(self.rnn(x[:, None].expand(-1, 3, -1))[0])
        attended = scaled_dot_product_attention(rows, rows, rows, is_causal=True)
        last: Tensor = self.head(attended[:, -1])
        return last


def features(n: int) -> Any:
    return (torch.randn(n, WIDTH),), torch.randn(n, WIDTH)


def sizes_of(
    model: nn.Module, batch: Callable[[int], Any], loss: Callable[[Any, Any], Tensor]
) -> Callable[[int], Any]:
    spec = planner.in_memory(model, example_batch=batch, loss=loss)
    usual = spec.example_batch(CAPTURED)
    sizes = OtherSizes(capture_file(spec, usual), spec.loss, usual)
    return lambda size: sizes.problem(spec.example_batch(size))


def thrice_where_single(x: Tensor) -> Tensor:
    return 3 * x if x.shape[0] == 1 else x


@pytest.mark.parametrize("model", [Sized(torch.tanh), Mixed(), Sized(nn.Dropout(0.5))])
def test_models_of_any_size_are_the_same_on_any(model: nn.Module) -> None:
    problem = sizes_of(model, features, mse_loss)

    assert [problem(size) for size in (CAPTURED, 1, 2, 3, 7)] == [None] * 5


def loss_of_positive_rows(output: Tensor, target: Tensor) -> Tensor:
    """How many rows it has depends on values, as with the mask of a padded sequence."""
    counted = target[:, 0] > 0
    return mse_loss(output[counted], target[counted])


def test_sizes_that_depend_on_values_are_alike() -> None:
    problem = sizes_of(Sized(torch.tanh), features, loss_of_positive_rows)

    assert [problem(size) for size in (2, 3, 7)] == [None] * 3


class OtherKernel(Sized):
    """Asks for another kernel where nobody traces, which takes no tensors without data."""

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if not torch.compiler.is_exporting():
            x = torch.tensor(x.tolist(), requires_grad=True)
        return super().forward(x, *others)


def test_a_model_that_cannot_run_without_data_is_not_said_to_fail_on_other_sizes() -> None:
    problem = sizes_of(OtherKernel(torch.tanh), features, mse_loss)

    assert problem(1) is None


def test_a_branch_for_a_single_sample_is_found_though_it_leaves_no_trace() -> None:
    problem = sizes_of(Sized(thrice_where_single), features, mse_loss)

    assert problem(2) is None
    assert "computes something else on it than was captured: aten.mul" in problem(1)


def test_code_that_fails_for_one_sample() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(output.squeeze(), target)

    problem = sizes_of(
        Sized(torch.tanh, out=1), lambda n: ((torch.randn(n, WIDTH),), torch.rand(n)), loss
    )

    assert problem(3) is None
    assert "the model fails on it: ValueError: Target size" in problem(1)


def test_one_input_of_one_size_makes_the_model_of_one_size() -> None:
    def batch(n: int) -> Any:
        return (torch.randn(n, WIDTH), torch.randn(n, WIDTH)), torch.randn(n, WIDTH)

    problem = sizes_of(
        SideTable(torch.tanh),
        batch,
        lambda output, target: mse_loss(output[0], target) + output[1].sum(),
    )

    assert problem(CAPTURED) is None
    where = rf"since \S+test_other_sizes.py:{_line_of('others[0] + self')} fixes that number"
    assert re.fullmatch(
        rf"the model takes microbatches of {CAPTURED} samples only, {where}", problem(3)
    )


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def length_in_python(x: Tensor) -> Tensor:
    return x.reshape(len(x), WIDTH)


def number_of_the_size(x: Tensor) -> Tensor:
    return x * int(x.shape[0])


@pytest.mark.parametrize(
    ("between", "line"),
    [(length_in_python, "x.reshape(len(x), WIDTH)"), (number_of_the_size, "x * int(x.shape[0])")],
)
def test_the_profile_names_the_line_that_fixes_the_size(
    between: Callable[[Tensor], Tensor], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    without = planner.in_memory(Sized(between), example_batch=features, loss=mse_loss)
    spec = planner.in_memory(Sized(between), example_batch=features, loss=mse_loss, dataset=list)
    graph = capture_file(spec, spec.example_batch(CAPTURED))
    caplog.clear()  # of the tracer's

    warn_of_only_size(graph, without)
    assert not caplog.messages  # all its batches are as large

    warn_of_only_size(graph, spec)
    (message,) = caplog.messages
    assert f"test_other_sizes.py:{_line_of(line)} fixes that number" in message


def test_what_cannot_be_copied_is_not_tried() -> None:
    class Uncopied(Sized):
        def __deepcopy__(self, memo: object) -> Any:
            raise RuntimeError("there is one of me")

    problem = sizes_of(Uncopied(torch.tanh), features, mse_loss)

    assert problem(1) == "the model cannot be copied, and so not be tried on it"
