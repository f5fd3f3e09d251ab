"""The table of memory: parts add up to the whole, and equal stages share a row."""

from __future__ import annotations

from planner.analysis.given_plan import price
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.reporting.tables.plan import memory_parts, memory_table
from planner.schedule.one_stage import GPIPE
from planner.solver import search_plan as solve
from tests.samples import layer, profile

LAYERS = [
    layer(f"{n}", 1, 2, output_bytes=10, weight_bytes=10**9, saved_bytes=100) for n in range(4)
]


def test_parts_add_up_to_the_memory_of_a_gpu() -> None:
    plan = solve(profile(*LAYERS), flat_cluster(2, 1e9), schedule="interleaved", microbatches=2)
    for stage in range(len(plan.stages)):
        assert sum(memory_parts(plan, stage).values()) == plan.memory_bytes(stage)
    assert [row[0] for row in memory_table(plan).rows] == ["0, 2", "1, 3"], "of each GPU"


def test_equal_stages_share_a_row() -> None:
    stages = tuple(OwnStage(layers=(each.name,)) for each in LAYERS)
    own = OwnPlan(stages=stages, schedule=GPIPE, microbatches=4)
    plan = price(profile(*LAYERS), flat_cluster(4, 1e9), own)
    table = memory_table(plan)
    assert [row[0] for row in table.rows] == ["0", "1-2", "3"]
    assert table.headers[:4] == ["stage", "memory per GPU", "weights", "gradients"]
    assert "overhead" not in table.headers
