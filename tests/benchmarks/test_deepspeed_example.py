"""DeepSpeed's example: two pipelines of two stages, drawn and run."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.published.deepspeed_example.__main__ import compare, example_plan
from planner.formats.plan import Plan
from planner.reporting.svg import timeline_svg
from planner.simulator.simulate_plan import simulate


@pytest.fixture(scope="module")
def plan() -> Plan:
    return example_plan()


def test_workers_0_and_2_are_a_pipeline_and_1_and_3_another(plan: Plan) -> None:
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    timeline = simulate(plan, minibatches=1)
    computed = {
        rank: [
            f"{event.kind[0].upper()}{event.microbatch}"
            for event in timeline.events.rows()
            if event.rank == rank and event.kind in ("forward", "backward")
        ]
        for rank in range(4)
    }
    assert computed[0] == ["F0", "F2", "B0", "F4", "B2", "F6", "B4", "B6"]
    assert computed[2] == ["F0", "B0", "F2", "B2", "F4", "B4", "F6", "B6"]
    assert computed[1] == ["F1", "F3", "B1", "F5", "B3", "F7", "B5", "B7"]
    assert [event.rank for event in timeline.events.rows() if event.kind == "all_reduce"] == [
        2,
        3,
        0,
        1,
    ]
    drawn = "".join(ElementTree.fromstring(timeline_svg([timeline])).itertext())
    assert "B0.7" in drawn


@pytest.mark.slow
def test_it_trains_as_the_unsplit_model(plan: Plan) -> None:
    compared = compare(plan, steps=6)
    assert compared.last_loss < compared.first_loss
    assert compared.loss_difference < 1e-5
    assert compared.weight_difference < 1e-3
