"""Which weights ranks divide where they are too many for the heads of a product."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.model.capture.capture import capture_file
from planner.model.spec import load_model_file
from planner.model.tensor.division import division_of
from planner.model.tensor.group import TensorGroup
from tests.executor.models import write_model


# a product of tokens, and one of flattened tokens, whose view is viewed again
@pytest.mark.parametrize("model", ["attention", "flattened"])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_product_of_fewer_heads_than_ranks_stays_whole(
    model: str, degree: int, tmp_path: Path
) -> None:
    """Four heads of queries, and two of keys and values."""
    spec = load_model_file(str(write_model(tmp_path, model, "sgd")))
    graph = capture_file(spec, spec.example_batch(4))
    styles = spec.functions["tensor_parallel_plan"]()
    cuts = division_of(graph, styles, TensorGroup(degree, 0)).cuts

    assert "blocks.0.query.weight" in cuts
    assert ("blocks.0.key.weight" in cuts) == (degree == 2)
    assert ("blocks.0.value.weight" in cuts) == (degree == 2)
