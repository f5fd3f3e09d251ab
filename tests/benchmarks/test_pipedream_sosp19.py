"""The rows of SOSP 2019, how they are run, and how they are reported."""

from __future__ import annotations

import pytest

from benchmarks.published.emulated_rows import published_plan
from benchmarks.published.pipedream_sosp19.__main__ import at_published_depth
from benchmarks.published.pipedream_sosp19.records import rows_of
from benchmarks.testbed.measure import recomputing
from benchmarks.testbed.predict import given_plan, simulated_s
from planner.formats.cluster import flat_cluster
from tests.samples import layer, profile

CHAIN = profile(
    *(layer(f"l{k}", 0.01, 0.02, 4_000, 8_000) for k in range(4)), layer("end", 0.01, 0.02)
)


def test_a_straight_pipeline_at_its_depth_is_faster_than_one_that_drains_and_recomputes() -> None:
    row = rows_of("straight")[0]
    links = flat_cluster(4, 1e9)
    plan = published_plan(CHAIN, links, row)
    assert plan is not None
    straight = at_published_depth(plan)
    assert [stage.in_flight for stage in straight.stages] == [4, 3, 2, 1]
    layers = [len(stage.layers) for stage in straight.stages]
    drained = recomputing(given_plan(CHAIN, links, layers, row.replicas, "gpipe", 4))
    # Stages of 1, 1, 1 and 2 layers: 4 x 60 ms, against three more times 30 ms to fill, and a third
    # more for forwards.
    assert 4 * simulated_s(straight) == pytest.approx(0.24, rel=0.02)
    assert simulated_s(drained) == pytest.approx(4 / 3 * (0.24 + 0.09), rel=0.05)
