"""Where ranks sit, and what that makes of transfers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.topology import Loads, Topology, column_ranks, rank_ranges
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.formats.cluster import (
    Cluster,
    DeviceKind,
    Level,
    flat_cluster,
    hierarchical_cluster,
)
from planner.formats.files import replace
from planner.formats.profile import Profile
from planner.plan.rank_groups import groups_of
from planner.schedule.registry import find
from planner.simulator.communication import ClusterLinks
from tests.examples import examples
from tests.solver.strategies import profiles

SERVERS = hierarchical_cluster((4, 4), (16.0, 1.0))


def test_ranks_fill_servers_in_order() -> None:
    topology = Topology(hierarchical_cluster((2, 3, 2), (8.0, 4.0, 2.0)))
    assert list(topology.groups) == [2, 6, 12]
    assert [int(topology.level(0, other)) for other in range(12)] == [
        0,
        0,
        1,
        1,
        1,
        1,
        2,
        2,
        2,
        2,
        2,
        2,
    ]
    assert topology.span(range(2, 4)) == 0
    assert topology.span(range(1, 3)) == 1
    assert topology.span(range(5, 7)) == 2


def test_levels_of_one_member_join_nothing() -> None:
    cluster = Cluster(
        levels=(Level(size=4, bandwidth_bytes_per_s=1.0), Level(size=1, bandwidth_bytes_per_s=9.0))
    )
    assert len(Topology(cluster)) == 1


@given(first=st.integers(0, 7), one=st.integers(1, 6), other=st.integers(1, 6))
def test_messages_spread_as_the_round_robin_says(first: int, one: int, other: int) -> None:
    topology = Topology(hierarchical_cluster((3, 2, 4), (8.0, 4.0, 2.0)))
    source, target = range(first, first + one), range(first + one, first + one + other)
    counted = np.zeros((3, one))
    minibatches = math.lcm(one, other)
    for minibatch in range(minibatches):
        ends = source[minibatch % one], target[minibatch % other]
        counted[int(topology.level(*ends)), minibatch % one] += one / minibatches
    np.testing.assert_allclose(topology.shares(source, target), counted)


@given(first=st.integers(0, 3), one=st.integers(1, 6), other=st.integers(1, 6))
def test_any_ranks_spread_as_consecutive_ones_do(first: int, one: int, other: int) -> None:
    topology = Topology(hierarchical_cluster((3, 2, 4), (8.0, 4.0, 2.0)))
    source, target = range(first, first + one), range(first + one, first + one + other)
    listed = topology.shares(tuple(source), tuple(target))
    np.testing.assert_allclose(listed, topology.shares(source, target))
    one_by_one, at_once = Loads(topology), Loads(topology)
    exchange = np.array([3.0, 5.0, 1.0, 1.0])
    assert one_by_one.add_transfer(tuple(source), tuple(target), exchange) == pytest.approx(
        at_once.add_transfer(source, target, exchange)
    )
    one_by_one.add_ring(tuple(source), 7.0)
    at_once.add_ring(source, 7.0)
    np.testing.assert_allclose(one_by_one.into, at_once.into)
    for listed, counted in zip(one_by_one.shared, at_once.shared, strict=True):
        np.testing.assert_allclose(listed, counted)


def test_columns_lie_one_after_the_other() -> None:
    assert column_ranks((2, 2), 1) == [range(2), range(2, 4)]
    assert column_ranks((2, 2), 2) == [(0, 2), (1, 3)]
    # Uneven replicas: each column has two of the first stage's and one of the others'.
    assert column_ranks((4, 2, 2), 2) == [(0, 4, 1, 5), (2, 6), (3, 7)]


@given(parts=st.lists(st.integers(1, 3), min_size=1, max_size=4), columns=st.integers(1, 4))
def test_columns_exchange_no_messages(parts: list[int], columns: int) -> None:
    replicas = [part * columns for part in parts]
    ranks = column_ranks(replicas, columns)
    assert sorted(rank for each in ranks for rank in each) == list(range(sum(replicas)))
    for minibatch in range(math.lcm(*replicas)):
        assert len({each[minibatch % len(each)] // sum(parts) for each in ranks}) == 1


def test_pipelines_in_servers_send_gradients_alone_between_them() -> None:
    loads = Loads(Topology(SERVERS))
    first, second = column_ranks((8, 8), 4)
    loads.add_transfer(first, second, np.array([32.0, 32.0, 1.0, 1.0]))
    assert not loads.shared[0][1].any()
    loads.add_ring(first, 64.0)
    assert list(loads.shared[0][0]) == [2 * 7 / 64 * 64.0] * 4


def test_fifteen_and_one_on_four_servers_of_four() -> None:
    # Rank 15 gets a message of every minibatch: 3 of 15 from its own server, 12 of 15 over its
    # server's link.
    loads = Loads(Topology(SERVERS))
    seconds = loads.add_transfer(range(15), range(15, 16), np.array([30.0, 60.0, 1.0, 1.0]))
    assert loads.into[15] == pytest.approx(30 * (3 / 15 / 16 + 12 / 15 / 1))
    assert loads.out[15] == pytest.approx(60 * (3 / 15 / 16 + 12 / 15 / 1))
    assert loads.out[0] == pytest.approx(30 / 15)
    assert loads.out[14] == pytest.approx(30 / 15 / 16)
    assert list(loads.shared[0][1]) == pytest.approx([30 * 4 / 15] * 3 + [60 * 12 / 15])
    busiest_s, first, end = loads.busiest_shared()
    assert (busiest_s, first, end) == (loads.shared[0][1][3], 12, 16)
    assert seconds == pytest.approx(90 * (3 / 15 / 16 + 12 / 15))


def test_a_ring_crosses_each_server_once() -> None:
    loads = Loads(Topology(SERVERS))
    loads.add_ring(range(2, 10), 64.0)
    moved = 2 * 7 / 64 * 64.0
    assert loads.into[2] == loads.out[9] == moved  # at the speed of the links between servers
    assert list(loads.shared[0][0]) == [moved, moved, moved, 0.0]


@settings(max_examples=examples(100), deadline=None)
@given(profile=profiles(most_layers=4), data=st.data())
def test_levels_alike_and_links_of_ones_own_are_a_flat_cluster(
    profile: Profile, data: st.DataObject
) -> None:
    layer_costs = LayerCosts(profile)
    count = len(profile.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else [])
    groups = [list(range(i, j)) for i, j in zip([0, *cuts], [*cuts, count], strict=True)]
    replicas = [data.draw(st.integers(1, 2)) for _ in groups]
    schedule: str = data.draw(st.sampled_from(["1f1b", "gpipe", "2bw"]))
    microbatches = 1 if schedule == "1f1b" else 3
    overlap = data.draw(st.booleans())
    levels = hierarchical_cluster(
        (2, 2, 2), (3.0,) * 3, None, (0.5,) * 3, shared=False, overlap=overlap
    )
    flat = flat_cluster(8, 3.0, None, 0.5, overlap=overlap)
    stages = candidates(groups, replicas)
    one = price(layer_costs, stages, Setting(levels, find(schedule), microbatches))
    other = price(layer_costs, stages, Setting(flat, find(schedule), microbatches))
    assert one.seconds_per_minibatch == pytest.approx(other.seconds_per_minibatch)
    assert one.memory == other.memory


@settings(max_examples=examples(100), deadline=None)
@given(profile=profiles(most_layers=4), data=st.data())
def test_without_sharing_no_plan_is_worse_than_at_the_slowest_bandwidth(
    profile: Profile, data: st.DataObject
) -> None:
    layer_costs, count = LayerCosts(profile), len(profile.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else [])
    groups = [list(range(i, j)) for i, j in zip([0, *cuts], [*cuts, count], strict=True)]
    stages = candidates(groups, [data.draw(st.integers(1, 4)) for _ in groups])
    levels = hierarchical_cluster((4, 4), (8.0, 1.0), shared=False)
    flat = flat_cluster(16, 1.0)
    one, other = (price(layer_costs, stages, Setting(each)) for each in (levels, flat))
    assert one.seconds_per_minibatch <= other.seconds_per_minibatch * (1 + 1e-9)


def test_ranks_of_stages_are_consecutive() -> None:
    assert rank_ranges((3, 1, 2)) == [range(3), range(3, 4), range(4, 6)]


def test_one_ring_reaches_less_than_several_at_once() -> None:
    """Two stages of two replicas each, one per server: each ring has its own rate, both together
    that of the link.
    """
    inner, outer = hierarchical_cluster((2, 2), (100.0, 12.0)).levels
    outer = outer.model_copy(update={"one_ring_bandwidth_bytes_per_s": 4.0})
    topology = Topology(Cluster(levels=(inner, outer)))
    loads = Loads(topology)
    for ranks in ((0, 2), (1, 3)):
        assert topology.stage_link(ranks).ring_bytes_per_s == 4.0
        loads.add_ring(ranks, 48.0)
    # a ring of two sends half of the bytes twice, once per round of two microbatches
    assert loads.busiest((0,)) == (6.0, 6.0)
    assert loads.busiest_shared()[0] == 2 * 24.0 / 12.0


def test_a_group_of_ranks_has_a_ring_for_each_of_them() -> None:
    inner, outer = hierarchical_cluster((4, 2), (100.0, 12.0)).levels
    outer = outer.model_copy(update={"one_ring_bandwidth_bytes_per_s": 4.0})
    cluster = Cluster(levels=(inner, outer))
    rates = [
        Topology(groups_of(cluster, degree)).ring_bytes_per_s[-1].item() for degree in (1, 2, 4)
    ]
    assert rates == [4.0, 4.0, 3.0]  # four at once share the link


# Four servers of four: three with fast links inside, and one whose link to others is fast.
OWN_LINKS = Cluster(
    levels=(
        Level(size=4, bandwidth_bytes_per_s=4.0),
        Level(size=4, bandwidth_bytes_per_s=1.0, all_reduce_bandwidth_bytes_per_s=0.5),
    ),
    kinds=(
        DeviceKind(count=12, link_ratios=(5.0, 1.0)),
        DeviceKind(count=4, link_ratios=(1.0, 3.0)),
    ),
)


def test_messages_and_rings_go_at_the_links_of_their_ends() -> None:
    topology = Topology(OWN_LINKS)
    for ranks, others, rates in (
        (range(2), range(2, 4), (20.0, 1.0)),
        (range(12, 14), range(14, 16), (4.0, 3.0)),
        # the slower end counts
        (range(8, 12), range(12, 16), (4.0, 1.0)),
    ):
        for each in topology.message_bytes_per_s(ranks, others).T:
            assert list(each) == list(rates)
    assert topology.ring(range(4)) == (0, 20.0)
    assert topology.ring(range(12, 16)) == (0, 4.0)
    assert topology.ring(range(8)) == (1, 0.5)
    assert topology.ring(range(8, 16)) == (1, 0.5)
    assert topology.link(1).bandwidth_bytes_per_s == OWN_LINKS.slowest_bandwidth_bytes_per_s == 1.0
    # what prices do not tell apart, simulations do not either
    links = ClusterLinks(OWN_LINKS)
    assert [links.message(*pair)[0].bytes_per_s for pair in ((0, 1), (12, 13), (0, 12))] == [
        20,
        4,
        1,
    ]
    assert links.ring(range(12, 16), [12])[0].bytes_per_s == 4.0


def test_a_link_that_two_kinds_share_is_the_slower_ones() -> None:
    kinds = (DeviceKind(count=6), DeviceKind(count=2, link_ratios=(1.0, 0.5)))
    cluster = replace(hierarchical_cluster((4, 2), (4.0, 1.0)), kinds=kinds)
    topology = Topology(cluster)
    assert [topology.link_ratio(1, rank) for rank in range(8)] == [1.0] * 4 + [0.5] * 4
    loads = Loads(topology)
    loads.add_ring(range(2, 6), 8.0)
    moved = 2 * 3 / 16 * 8.0
    assert list(loads.shared[0][0]) == [moved, moved / 0.5]


@settings(max_examples=examples(60), deadline=None)
@given(profile=profiles(most_layers=4), data=st.data())
def test_links_that_are_all_twice_as_fast_are_levels_of_twice_the_rate(
    profile: Profile, data: st.DataObject
) -> None:
    """Also of groups of ranks that divide layers."""
    sizes = data.draw(st.sampled_from([(8,), (4, 2), (2, 4)]))
    slow = tuple(
        Level(size=size, bandwidth_bytes_per_s=rate, all_reduce_bandwidth_bytes_per_s=rate / 2)
        for size, rate in zip(sizes, (6.0, 2.0), strict=False)
    )
    first = data.draw(st.sampled_from([2, 4, 6]))
    twice = (2.0,) * len(sizes)
    kinds = tuple(DeviceKind(count=count, link_ratios=twice) for count in (first, 8 - first))
    plain = tuple(DeviceKind(count=count) for count in (first, 8 - first))
    ratios = Cluster(levels=slow, kinds=kinds)
    levels = Cluster(levels=tuple(each.times_as_fast(2.0) for each in slow), kinds=plain)

    layer_costs, count = LayerCosts(profile), len(profile.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else [])
    parts = [list(range(i, j)) for i, j in zip([0, *cuts], [*cuts, count], strict=True)]
    stages = candidates(parts, [data.draw(st.integers(1, 8 // len(parts))) for _ in parts])
    for schedule in ("1f1b", "2bw", "1f1b-flush", "gpipe"):
        microbatches = 1 if schedule == "1f1b" else 8
        prices = [
            price(layer_costs, stages, Setting(each, find(schedule), microbatches))
            for each in (ratios, levels)
        ]
        assert prices[0].seconds_per_minibatch == pytest.approx(prices[1].seconds_per_minibatch)
    groups, of_levels = groups_of(ratios, 2), groups_of(levels, 2)
    assert [kind.count for kind in groups.kinds] == [first // 2, 4 - first // 2]
    np.testing.assert_allclose(
        Topology(groups).ring_bytes_per_s, Topology(of_levels).ring_bytes_per_s
    )
