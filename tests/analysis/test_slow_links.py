"""Answers that rest on the rates of data sheets are priced again on slower links."""

from __future__ import annotations

import planner
from planner.analysis.slow_links import with_slow_links
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.plan import Plan, load_plan, save_plan
from planner.options.solving import SolveOptions
from planner.reporting.tables.links import links_line, links_warning
from planner.reporting.tables.plan import plan_report
from planner.solver.clock import Clock
from planner.solver.request import Request
from tests.samples import layer, profile

GB = 10**9
# The all-reduce of 32 GB takes 2.6 s on 100 Gbit/s, less than a backward of 4 s, and 13 s at a
# fifth of it.
HEAVY = profile(
    *(
        layer(name, 0.5, 1.0, output_bytes=10**6, weight_bytes=8 * GB, saved_bytes=10**6)
        for name in "abc"
    ),
    layer("d", 0.5, 1.0, weight_bytes=8 * GB, saved_bytes=10**6),
)
FLUSH = SolveOptions(schedule="1f1b-flush", microbatches=8)


def solved(cluster: Cluster) -> Plan:
    return planner.solve(HEAVY, cluster, schedule="1f1b-flush", microbatches=8)


def test_the_choice_flips() -> None:
    plan = solved(flat_cluster(2, "100Gbps"))
    slow = plan.slow_links
    assert plan.config == "2"
    assert slow is not None
    assert slow.bytes_per_s == 0.2 * 12.5e9
    assert slow.fastest is not None
    assert slow.fastest.config == "1-1"
    there = solved(flat_cluster(2, 2.5e9))
    own = planner.price(
        HEAVY, flat_cluster(2, 2.5e9), 1, replicas=2, schedule="1f1b-flush", microbatches=8
    )
    seconds = own.predicted.seconds_per_minibatch
    assert there.config == "1-1"
    assert slow.fastest.speedup == seconds / there.predicted.seconds_per_minibatch
    assert slow.slowdown == seconds / plan.predicted.seconds_per_minibatch
    assert slow.steadiest is not None
    assert slow.steadiest.loss < slow.loss


def test_sentences_of_a_choice_that_flips() -> None:
    plan = solved(flat_cluster(2, "100Gbps"))
    line = links_line(plan)
    assert line is not None
    assert line.startswith("100 Gbps per GPU is from a data sheet, not measured; on links of 20 Gb")
    assert "1-1 is " in line
    assert "slower than the fastest, and this plan up to" in line
    assert line in " ".join(plan_report(plan).split())
    warning = links_warning(plan)
    assert warning is not None
    assert "the choice depends on links that were not measured" in warning[0]
    assert "`bandwidth`" in warning[1]


def test_links_that_hardly_count_leave_the_choice() -> None:
    plan = solved(flat_cluster(2, "3200Gbps"))
    slow = plan.slow_links
    assert slow is not None
    assert slow.fastest is None
    assert slow.steadiest is None
    line = links_line(plan)
    assert line is not None
    assert line.endswith("and is still the fastest")
    assert links_warning(plan) is None


def test_a_rate_that_somebody_knows_is_not_doubted() -> None:
    for known in ("10Gbps", "12.5GB/s", 12.5e9):
        cluster = flat_cluster(2, known)
        assert cluster.level_by_data_sheet is None
        plan = solved(cluster)
        assert plan.slow_links is None
        assert links_line(plan) is None


def test_the_outermost_level_is_the_one_in_doubt() -> None:
    cluster = hierarchical_cluster((2, 2), ("nvlink3", "400Gbps"))
    assert cluster.level_by_data_sheet == 1
    assert hierarchical_cluster((2, 2), ("nvlink3", "10Gbps")).level_by_data_sheet == 0
    assert hierarchical_cluster((2, 1), ("nvlink3", "400Gbps")).level_by_data_sheet == 0
    slower = cluster.level_times_as_fast(1, 0.2)
    assert slower.levels[0] == cluster.levels[0]
    assert slower.levels[1].bandwidth_bytes_per_s == 0.2 * 50e9


def test_without_time_the_answer_says_so() -> None:
    cluster = flat_cluster(2, "100Gbps")
    plan = planner.price(HEAVY, cluster, 1, replicas=2, schedule="1f1b-flush", microbatches=8)
    assert links_line(plan) == "100 Gbps per GPU is from a data sheet, not measured"
    late = Request(HEAVY, cluster, FLUSH, Clock.of(0.0))
    slow = with_slow_links(plan, late).slow_links
    assert slow is not None
    assert not slow.complete
    line = links_line(plan.model_copy(update={"slow_links": slow}))
    assert line is not None
    assert "the time limit ended the search before it tried others" in line


def test_files_keep_it(tmp_path: object) -> None:
    plan = solved(flat_cluster(2, "100Gbps"))
    save_plan(plan, f"{tmp_path}/plan.json")
    assert load_plan(f"{tmp_path}/plan.json") == plan
