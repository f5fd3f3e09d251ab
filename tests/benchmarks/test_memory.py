"""The plans whose memory is measured."""

from __future__ import annotations

import pytest

from benchmarks.testbed.memory.plans import Shape, cut_by_time, shaped_plan
from tests.samples import layer, profile


def test_cuts_are_nearest_to_each_stages_share() -> None:
    assert cut_by_time([1, 1, 1, 1], [1, 1]) == [(0, 2), (2, 4)]
    assert cut_by_time([1, 1, 1, 1, 2], [2, 1]) == [(0, 4), (4, 5)]
    assert cut_by_time([9, 1, 1], [1, 1, 1]) == [(0, 1), (1, 2), (2, 3)]  # no stage is empty


@pytest.mark.parametrize("shape", [Shape((2, 1)), Shape((1, 1), "gpipe", 4, recompute=True)])
def test_plans_have_the_shape_asked_for(shape: Shape) -> None:
    model = profile(
        *(layer(f"l{i}", output_bytes=10, saved_bytes=20, weight_bytes=5) for i in range(6))
    )
    plan = shaped_plan(model, shape)
    assert plan.replicas == shape.replicas
    assert (plan.schedule.name, plan.microbatches) == (shape.schedule, shape.microbatches)
    assert {stage.recompute for stage in plan.stages} == {shape.recompute}
    assert sum(len(stage.layers) for stage in plan.stages) == 6
