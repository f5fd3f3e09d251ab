"""The rows of SOSP 2019, how they are run, and how they are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kept import Results
from benchmarks.pipedream_sosp19.__main__ import at_published_depth
from benchmarks.pipedream_sosp19.records import PARTS, Scheduled, Solved, rows_of, tables
from benchmarks.published_rows import Ran, published_plan
from benchmarks.testbed.measure import recomputing
from benchmarks.testbed.predict import given_plan, simulated_s
from planner.formats.cluster import flat_cluster
from tests.samples import layer, profile

CHAIN = profile(*(layer(f"l{k}", 0.01, 0.02, 4_000, 8_000) for k in range(4)), layer("end", 0.01, 0.02))


def test_each_part_has_its_rows() -> None:
    assert {(row.model, row.config) for row in rows_of("nominal")} >= {
        ("vgg16", "15-1"),
        ("alexnet", "15-1"),
        ("gnmt16", "straight"),
        ("gnmt8", "straight"),
        ("s2vt", "2-1-1"),
    }
    assert [row.gpus for row in rows_of("straight")] == [4, 8]
    assert [row.name for row in rows_of("gpipe")] == ["gnmt16, 4x4 (A)", "gnmt16, 8x2 (B)"]
    for part in PARTS:
        names = [row.name for row in rows_of(part)]
        assert len(set(names)) == len(names)  # results are kept by name


def test_the_tables_have_what_is_kept(tmp_path: Path) -> None:
    results = Results(tmp_path, save=False)
    assert tables(results) == ""
    row, straight = rows_of("nominal")[0], rows_of("straight")[0]
    results.add("solved", row.name, Solved("15-1", 2.5, 0.86, 2.5, 6.3, 4e8))
    results.add("nominal", row.name, Ran(1.25e9, "15-1", 15.0, 6.0, None, 0.86, 0.99))
    results.add("straight", straight.name, Ran(8e8, "3-1", 3.8, 1.5, 2.6, 0.8, 1.0))
    results.add("gpipe", "gnmt16, 4x4 (A): 1f1b", Scheduled(1.0, 1.0))
    results.add("gpipe", "gnmt16, 4x4 (A): gpipe, recomputing", Scheduled(2.0, 2.5))
    text = tables(results)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [row.name, "15-1", "5.28", "15-1", "2.50", "86%", "2.50", "6.30"] in cells
    assert [row.name, "10.00", "15-1", "5.28", "15-1", "2.50", "as ours", "6.00", "0.99"] in cells
    assert [straight.name, "6.40", "2.56", "2.60", "2-1-1: 3.14", "3-1: 3.80", "1.50"] in cells
    assert ["gnmt16, 4x4 (A)", "gpipe, recomputing", "2.00", "2.50", "50%", "60%", "55%"] in cells


def test_a_straight_pipeline_at_its_depth_is_faster_than_one_that_drains_and_recomputes() -> None:
    row = rows_of("straight")[0]
    links = flat_cluster(4, 1e9)
    plan = published_plan(CHAIN, links, row)
    assert plan is not None
    straight = at_published_depth(plan)
    assert [stage.in_flight for stage in straight.stages] == [4, 3, 2, 1]
    layers = [len(stage.layers) for stage in straight.stages]
    drained = recomputing(given_plan(CHAIN, links, layers, row.replicas, "gpipe", 4))
    # Stages of 1, 1, 1 and 2 layers: 4 x 60 ms, against three more times 30 ms to fill, and a third more for forwards.
    assert 4 * simulated_s(straight) == pytest.approx(0.24, rel=0.02)
    assert simulated_s(drained) == pytest.approx(4 / 3 * (0.24 + 0.09), rel=0.05)
