"""Which values have rows of experts, and which weights ranks divide by experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.spec import load_model_file
from planner.model.tensor.division import division_of
from planner.model.tensor.experts import Experts, find_experts
from planner.model.tensor.group import TensorGroup
from planner.model.tensor.parallel_plan import found_plan
from tests.executor.models import write_model

COUNT, WIDTH = 4, 16
ENDS = torch.arange(1, COUNT + 1, dtype=torch.int32) * 3  # three rows for each expert


class Mixture(nn.Module):
    """Grouped products of rows in the order of their experts."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH).bfloat16()) for _ in range(2)
        )
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.compute(self, x)
        return made.float()


def graph_of(compute: Callable[..., Tensor]) -> LayerGraph:
    x = torch.randn(3 * COUNT, WIDTH).bfloat16()
    spec = planner.in_memory(
        Mixture(compute), example_batch=((x,), x), loss=lambda output, _: output.square().mean()
    )
    return capture_file(spec, spec.example_batch(3 * COUNT))


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = F.grouped_mm(x, weight, offs=ENDS)
    return made


def names_of(found: Experts) -> set[str]:
    return {node.name for node in found.rows}


def test_rows_are_those_of_products_and_of_what_is_between_them(tmp_path: Path) -> None:
    spec = load_model_file(write_model(tmp_path, "experts", "sgd"))
    found = find_experts(capture_file(spec, spec.example_batch(4)))
    assert found.counts == {
        f"blocks.{n}.experts.{name}": COUNT for n in range(2) for name in ("both", "down")
    }
    one = {node.name for node, offsets in found.rows.items() if offsets.name == "to"}
    assert {"_grouped_mm", "silu", "mul", "dropout_1", "_grouped_mm_1", "to_4"} <= one
    assert not one & {"index", "to_3", "mul_1", "index_2"}
    # The second block drops values between its products, which depends on all rows.
    assert len([node for node in found.rows if node.name.startswith("dropout")]) == 1


@pytest.mark.parametrize(
    ("compute", "counted"),
    [
        (lambda m, x: grouped(grouped(x, m.up).relu(), m.down.transpose(1, 2)), ["up", "down"]),
        # read otherwise, too
        (lambda m, x: grouped(grouped(x, m.up), m.down.bfloat16()) * m.up.mean(), ["down"]),
        (lambda m, x: x @ m.up[0] + grouped(x, m.down), ["down"]),
        (lambda m, x: x @ m.up[0] @ m.down[0], []),
    ],
)
def test_weights_of_grouped_products_alone_are_divided(
    compute: Callable[..., Tensor], counted: list[str]
) -> None:
    graph = graph_of(compute)
    assert list(find_experts(graph).counts) == counted
    assert found_plan(graph, 2) == dict.fromkeys(counted, "grouped_gemm")
    assert found_plan(graph, 3) == {}
    assert division_of(graph, found_plan(graph, 2), TensorGroup(2, 0)).experts == dict.fromkeys(
        counted, COUNT
    )


def test_what_mixes_rows_ends_them() -> None:
    """A softmax over the rows, a sum over them, and random numbers, which are those of all rows."""
    for compute, last in (
        (lambda m, x: grouped(x, m.up).softmax(0), "softmax"),
        (lambda m, x: grouped(x, m.up) - grouped(x, m.up).sum(0), "sum_1"),
        (lambda m, x: F.dropout(grouped(x, m.up), 0.5), "dropout"),
    ):
        found = names_of(find_experts(graph_of(compute)))
        assert "_grouped_mm" in found
        assert last not in found
