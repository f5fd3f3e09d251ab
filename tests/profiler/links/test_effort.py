"""A measurement of links sends as much as its time allows, and says how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.formats import files as cluster_files
from planner.formats.cluster import Cluster, Level
from planner.profiler.links.effort import TURNS, Effort, Pace, fitting_effort
from planner.profiler.links.levels import typical_level
from planner.reporting.tables.plan import cluster_line

FAST = Pace(size=2, turns=1, s_per_byte=1e-9, round_s=1e-4, unit_s_per_byte=1e-8)
# Four hosts of four workers on links of 6 MB/s, whose processes share two cores.
SLOW = Pace(size=4, turns=3, s_per_byte=4 / 6e6, round_s=0.01, unit_s_per_byte=1e-6)


def test_fast_links_are_measured_in_full() -> None:
    effort, expected_s = fitting_effort(Effort(), [FAST], budget_s=120)
    assert effort == Effort().in_turns(TURNS)
    assert 2 < expected_s < 15


@pytest.mark.parametrize("budget_s", [45, 60, 120])
def test_slow_links_carry_less(budget_s: float) -> None:
    assert SLOW.expected_s(Effort()) > 120
    effort, expected_s = fitting_effort(Effort(), [SLOW, SLOW], budget_s)
    assert 0.3 * budget_s < expected_s <= budget_s
    assert effort.message_bytes < Effort().message_bytes
    assert effort.bucket_bytes < Effort().bucket_bytes


def test_the_least_effort_still_says_something() -> None:
    crawling = Pace(size=2, turns=1, s_per_byte=1e-3, round_s=1.0)
    effort, expected_s = fitting_effort(Effort(), [crawling], budget_s=1)
    assert effort.message_bytes == effort.unit_bytes == 2**16
    assert effort.latency_rounds == 10
    assert expected_s > 100


def test_an_effort_that_asks_for_less_is_not_raised() -> None:
    small = Effort(message_bytes=64, bucket_bytes=64, latency_rounds=3)
    scaled = small.scaled(0.5)
    assert (scaled.message_bytes, scaled.bucket_bytes, scaled.latency_rounds) == (64, 64, 3)


def test_the_one_ring_over_all_is_part_of_the_time() -> None:
    """Its buckets move 2 · 15/16 of their bytes, and those of four hosts 2 · 3/4."""
    both = replace(SLOW, one_ring_size=16)
    effort = Effort()
    one_ring_s = effort.seconds + 2 * effort.bucket_bytes * 2 * 15 / 16 * SLOW.s_per_byte
    assert both.expected_s(effort) == pytest.approx(SLOW.expected_s(effort) + one_ring_s)
    fitting, expected_s = fitting_effort(effort, [SLOW, both], budget_s=60)
    assert expected_s <= 60
    assert fitting.bucket_bytes < effort.bucket_bytes


def test_many_hosts_have_less_time_for_each_pair() -> None:
    """The pairs of neighbouring hosts are measured one after the other."""
    many = Pace(size=256, turns=255, s_per_byte=1e-9, round_s=1e-4)
    effort, expected_s = fitting_effort(Effort(), [many], budget_s=60)
    assert expected_s <= 60
    assert effort.seconds < 0.3


def test_products_between_sums_are_part_of_the_time() -> None:
    """Two sizes of computation before 64 small sums each, in eight turns with the sums and eight
    without.
    """
    slow_core = replace(FAST, products_s=3e-4)
    products_s = 16 * 64 * (4 + 12) * slow_core.products_s
    large_s = 16 * 4 * 16 * slow_core.products_s
    more_s = slow_core.expected_s(Effort()) - FAST.expected_s(Effort())
    assert more_s == pytest.approx(products_s + large_s, rel=1e-6)

    fitting, expected_s = fitting_effort(Effort(), [slow_core], budget_s=2)
    assert expected_s <= 2
    assert fitting.summed_bytes < Effort().summed_bytes


def test_one_disturbed_turn_changes_nothing() -> None:
    """In the second turn another process had the cores: all-reduces at a quarter of their rate."""
    quiet = Level(
        size=2,
        bandwidth_bytes_per_s=2e9,
        latency_s=1e-4,
        all_reduce_bandwidth_bytes_per_s=1.2e9,
        sum_bandwidth_bytes_per_s=1e9,
        sum_latency_s=2e-4,
        sum_wait_share=0.1,
        sum_wait_s=1e-3,
        rate_source="measured",
    )
    disturbed = quiet.times_as_fast(0.25)
    disturbed = cluster_files.replace(disturbed, latency_s=5e-3, sum_wait_share=0.9)
    level = typical_level([quiet, disturbed, quiet])
    assert level.all_reduce_between_bytes_per_s == (0.3e9, 1.2e9)
    assert cluster_files.replace(level, all_reduce_between_bytes_per_s=None) == quiet

    told = cluster_line(Cluster(levels=(level,)))
    assert "all-reduces measured between 2.4 Gbps and 9.6 Gbps: something disturbed" in told


def test_turns_that_agree_are_no_news() -> None:
    first = Level(size=2, bandwidth_bytes_per_s=2e9, all_reduce_bandwidth_bytes_per_s=1.2e9)
    turns = [first.times_as_fast(share) for share in (0.8, 1.0, 1.1)]
    assert typical_level(turns) == first
