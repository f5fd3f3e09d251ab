"""Links that are shared fairly."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import pairwise

import pytest

from planner.simulator import fair_network
from planner.simulator.fair_network import FairNetwork, LinkDirection, LinkPath


def path(*links: LinkDirection, limit: float = math.inf) -> LinkPath:
    return LinkPath(links, min(limit, *(link.bytes_per_s for link in links)))


def ends_of(begins: list[tuple[float, LinkPath, float]]) -> list[float]:
    """When each of some flows ends, by when it begins, what it crosses, and its bytes."""
    net, ends, waiting = (
        FairNetwork(),
        [math.nan] * len(begins),
        sorted(enumerate(begins), key=lambda item: item[1][0]),
    )

    def ended(number: int, now_s: float) -> None:
        ends[number] = now_s

    while waiting or not math.isinf(net.next_s):
        if waiting and waiting[0][1][0] <= net.next_s:
            number, (now_s, crossed, size) = waiting.pop(0)
            net.start(now_s, crossed, size, partial(ended, number))
        else:
            net.finish_next()
    return ends


def test_flows_share_the_tightest_link_equally_and_give_the_rest_to_others() -> None:
    """Two messages leave on 10 B/s: one to a link of 4 B/s, the other gets the remaining 6 B/s."""
    out, slow, fast = LinkDirection(10.0), LinkDirection(4.0), LinkDirection(10.0)
    assert ends_of([(0.0, path(out, slow), 40.0), (0.0, path(out, fast), 30.0)]) == pytest.approx(
        [10.0, 5.0]
    )


def test_rates_change_when_others_begin_and_end() -> None:
    """Alone 4 s at 10 B/s; then 5 B/s each until the short one has its 10 bytes; then alone
    again.
    """
    link = LinkDirection(10.0)
    assert ends_of([(0.0, path(link), 60.0), (4.0, path(link), 10.0)]) == pytest.approx([7.0, 6.0])
    assert [pytest.approx(tuple(busy)) for busy in link.busy] == [(0.0, 7.0, 1.0)]


def test_a_limit_of_its_own_leaves_the_rest_of_a_link_to_others() -> None:
    link = LinkDirection(10.0)
    ends = ends_of(
        [
            (0.0, path(link, limit=2.0), 20.0),
            (0.0, path(link), 40.0),
            (20.0, path(link, limit=2.0), 4.0),
        ]
    )
    assert ends == pytest.approx([10.0, 5.0, 22.0])
    assert [busy.share for busy in link.busy] == pytest.approx([0.6, 0.2])


def test_nothing_takes_no_time() -> None:
    assert ends_of([(3.0, path(LinkDirection(1.0)), 0.0)]) == [3.0]


@pytest.mark.parametrize("seed", range(20))
def test_no_link_carries_more_than_it_can_and_every_flow_has_a_full_link(seed: int) -> None:
    """Max-min fairness: on some link of each flow nothing is left, and nobody there gets more than
    it.
    """
    rng = random.Random(seed)
    links = [LinkDirection(rng.choice([1.0, 2.0, 5.0])) for _ in range(6)]
    net = FairNetwork()
    for _ in range(12):
        net.start(0.0, path(*rng.sample(links, rng.randint(1, 3))), 1e9, lambda now_s: None)
    flows = {flow for link in links for flow in link.flows}
    for link in links:
        assert sum(each.bytes_per_s for each in link.flows) <= link.bytes_per_s * (1 + 1e-9)
    for flow in flows:
        full = [
            link
            for link in flow.links
            if sum(each.bytes_per_s for each in link.flows) >= link.bytes_per_s * (1 - 1e-9)
        ]
        assert any(
            flow.bytes_per_s >= max(each.bytes_per_s for each in link.flows) * (1 - 1e-9)
            for link in full
        )


def test_far_off_flows_keep_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain of shared links, of which a change is told a few only: all comes through, and
    not much later.
    """
    links = [LinkDirection(10.0) for _ in range(30)]
    chain = [
        (0.1 * number, path(one, other), 40.0 + number)
        for number, (one, other) in enumerate(pairwise(links))
    ]
    exact = ends_of(chain)
    monkeypatch.setattr(fair_network, "NEAREST", 6)
    assert max(ends_of(chain)) == pytest.approx(max(exact), rel=0.1)
