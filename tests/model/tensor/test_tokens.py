"""Which values ranks divide by tokens, from the sum behind one product to the gathering before the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.spec import load_model_file
from planner.model.tensor.division import DividedWeights, division_of
from planner.model.tensor.group import TensorGroup
from planner.model.tensor.parallel_plan import found_plan
from tests.executor.models import write_model
from tests.model.tensor.test_parallel_plan import WIDTH, Calls, linear

DEGREE = 5  # of as many tokens


def divided(graph: LayerGraph, degree: int) -> dict[str, int]:
    """Return the values that ranks divide by tokens, by the names of their operations, with the
    tokens' dimension.
    """
    division = division_of(graph, found_plan(graph, degree), TensorGroup(degree, 0))
    within = DividedWeights(division.group, division.cuts, by_tokens=True).within(graph, ())
    return {node.name: dimension for node, dimension in within.tokens.items()}


class Fed(Calls):
    """A feed-forward layer of two products, and what follows it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self["down"](self["up"](x).relu()) + x)


def fed(after: nn.Module, compute: Callable[..., Tensor]) -> LayerGraph:
    model, x = (
        Fed(compute, up=linear(outputs=20), down=linear(inputs=20), after=after),
        torch.randn(3, 5, WIDTH),
    )
    spec = planner.in_memory(
        model, example_batch=((x,), x), loss=lambda output, _: output.square().mean()
    )
    return capture_file(spec, spec.example_batch(3))


@pytest.mark.parametrize(
    ("after", "ends"),
    [
        (lambda m, x: m["after"](x), {"layer_norm": 1}),
        (lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), {"mul": 1, "mean": 1}),
        (lambda m, x: x.transpose(0, 1).contiguous().sigmoid(), {"sigmoid": 0}),
        (lambda m, x: nn.functional.dropout(x, 0.1), {"dropout": 1}),
        (lambda m, x: x.view(-1, 5, 4, 4).sum(-1), {"sum_1": 1}),
        (lambda m, x: x - x.mean(1, keepdim=True), {"mean": None, "sub": 1}),
        (lambda m, x: x.softmax(1), {"softmax": None}),
        (lambda m, x: x.flatten(0, 1) * 2, {"flatten": None, "mul": None}),
        (lambda m, x: x.narrow(1, 0, 4).cos(), {"cos": None}),
    ],
)
def test_what_works_on_each_token_alone_stays_divided(
    after: Callable[..., Tensor], ends: dict[str, int | None]
) -> None:
    found = divided(fed(nn.LayerNorm(WIDTH), after), DEGREE)
    assert found["linear_1"] == found["add"] == 1
    assert {name: found.get(name) for name in ends} == ends  # None: every rank has it whole


def test_tokens_and_samples_of_one_dimension(tmp_path: Path) -> None:
    """Products of flattened tokens begin behind the view that has the tokens again, and end before
    the next.
    """
    spec = load_model_file(write_model(tmp_path, "flattened", "sgd"))
    found = divided(capture_file(spec, spec.example_batch(4)), 4)
    assert {
        dimension
        for name, dimension in found.items()
        if name.startswith(("view", "add", "mean", "mul"))
    } == {1}
    assert not [name for name in found if name.startswith("addmm")]


def test_ranks_that_do_not_divide_the_tokens_divide_no_value_by_them() -> None:
    graph = fed(nn.LayerNorm(WIDTH), lambda m, x: m["after"](x))
    assert found_plan(graph, 4)
    assert divided(graph, 4) == {}
