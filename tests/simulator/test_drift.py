"""Windows of runs that are simulated on the true cluster: what lasts is told once, noise never."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.timeline import Event
from planner.simulator.drift import DriftJudge, Expectation, Parting, Window
from tests.analysis.test_measured_cluster import pipeline_of, run_on, slower
from tests.simulator.plans import equal_layers

PLANNED = flat_cluster(4, 1e4)
LAYERS = equal_layers(4, output_bytes=4000, weight_bytes=10, saved_bytes=5)
MINIBATCHES = 20  # of a window


@pytest.fixture(params=["1f1b", "1f1b-flush", "zb-h1"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return pipeline_of(LAYERS, request.param, PLANNED)


def window_on(plan: Plan, cluster: Cluster, number: int, noise: float = 0.0) -> Window:
    """A window of a run on other devices or links; computations take up to `noise` longer."""
    drawn = random.Random(number)
    first = number * MINIBATCHES
    events = []
    for event in run_on(plan, cluster, MINIBATCHES, seed=number).events.rows():
        longer = 1 + drawn.uniform(0, noise) if event.lane == "compute" else 1.0
        events.append(
            event._replace(
                minibatch=event.minibatch + first,
                end_s=event.start_s + longer * (event.end_s - event.start_s),
            )
        )
    return Window(first, first + MINIBATCHES, events, 1.0)


def told(judge: DriftJudge, windows: Iterator[Window]) -> list[Parting]:
    return [parting for window in windows if (parting := judge.look(window)) is not None]


def test_a_worker_that_stays_slow_is_told_once(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))
    slow = slower(PLANNED, 1.0, 1.0, 0.5, 1.0)
    clusters = [PLANNED, PLANNED, slow, slow, slow, slow]

    found = told(judge, (window_on(plan, each, n) for n, each in enumerate(clusters)))

    (parting,) = found
    assert parting.since == 2 * MINIBATCHES
    assert parting.workers == {2: pytest.approx(2.0, rel=0.03)}
    assert not parting.routes


def test_its_recovery_is_told_too(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))
    slow = slower(PLANNED, 1.0, 1.0, 0.5, 1.0)
    clusters = [slow, slow, PLANNED, PLANNED, PLANNED]

    found = told(judge, (window_on(plan, each, n) for n, each in enumerate(clusters)))

    assert [parting.workers for parting in found] == [
        {2: pytest.approx(2.0, rel=0.03)},
        {2: pytest.approx(1.0, rel=0.03)},
    ]


def test_links_that_stay_slow_are_told(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))
    slow = flat_cluster(4, 1e4 / 4)

    found = told(judge, (window_on(plan, slow, n) for n in range(4)))

    (parting,) = found
    assert parting.since == 0
    assert set(parting.routes) == {(0, 1), (1, 2), (2, 3)}
    assert all(ratio > 2 for ratio in parting.routes.values())
    assert not parting.workers


def test_one_bad_window_is_noise(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))
    slow = slower(PLANNED, 0.3, 0.3, 0.3, 0.3)
    clusters = [PLANNED, slow, PLANNED, slow, PLANNED, slow]
    assert not told(judge, (window_on(plan, each, n) for n, each in enumerate(clusters)))


def test_what_is_clear_needs_no_second_window(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))
    slow = slower(PLANNED, 1.0, 1.0, 0.5, 1.0)
    quiet = [window_on(plan, PLANNED, n) for n in range(5)]
    assert not told(judge, iter(quiet))

    # It begins in the middle of a window.
    before = window_on(plan, PLANNED, 5)
    after = window_on(plan, slow, 5)
    middle = before.first + MINIBATCHES // 2
    events = [event for event in before.events if event.minibatch < middle]
    events += [event for event in after.events if event.minibatch >= middle]
    assert judge.look(before._replace(events=events)) is None
    parting = judge.look(window_on(plan, slow, 6))

    assert parting is not None
    assert parting.clear
    assert parting.since == middle


def test_after_bursts_a_second_window_is_needed(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))
    burst = slower(PLANNED, 1.0, 1.0, 0.3, 1.0)
    slow = slower(PLANNED, 1.0, 1.0, 0.7, 1.0)
    clusters = [PLANNED, burst, PLANNED, PLANNED, burst, PLANNED, slow]
    assert not told(judge, (window_on(plan, each, n) for n, each in enumerate(clusters)))

    parting = judge.look(window_on(plan, slow, 7))

    assert parting is not None
    assert not parting.clear


def test_noise_of_every_computation_is_no_drift(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))
    windows = (window_on(plan, PLANNED, n, noise=0.4) for n in range(30))
    assert not told(judge, windows)


def test_clocks_that_differ_are_no_slow_links(plan: Plan) -> None:
    judge = DriftJudge(Expectation.of(plan))

    def by_its_clock(event: Event) -> Event:
        ahead_s = 0.15 if event.rank >= 2 else 0.0
        return event._replace(start_s=event.start_s + ahead_s, end_s=event.end_s + ahead_s)

    for number in range(4):
        window = window_on(plan, PLANNED, number)
        window = window._replace(events=[by_its_clock(event) for event in window.events])
        assert judge.look(window) is None


def test_messages_that_take_no_time_do_not_count() -> None:
    fast = flat_cluster(4, 1e8)
    plan = pipeline_of(LAYERS, "1f1b-flush", fast)
    judge = DriftJudge(Expectation.of(plan))
    assert not told(judge, (window_on(plan, flat_cluster(4, 1e7), n) for n in range(4)))


def test_a_worker_that_is_left_out_is_told_when_it_recovers(plan: Plan) -> None:
    """What it measures is relative to the plan, which knows that it is slow."""
    judge = DriftJudge(Expectation.of(plan))
    ratios = [1.0, 1.02, 0.98, 1.0, 0.3, 0.3, 0.3, 0.3]
    windows = [
        window_on(plan, PLANNED, n)._replace(left_out={4: ratio}) for n, ratio in enumerate(ratios)
    ]

    (parting,) = told(judge, iter(windows))

    assert parting.since == 4 * MINIBATCHES
    assert parting.workers == {4: 0.3}
    assert parting.clear


def test_each_look_counts_for_its_share_of_a_window(plan: Plan) -> None:
    slow = slower(PLANNED, 1.0, 1.0, 0.5, 1.0)
    clusters = [PLANNED] * 6 + [slow] * 5
    windows = [window_on(plan, each, n, noise=0.02) for n, each in enumerate(clusters)]

    def looks(share: float) -> int:
        judge = DriftJudge(Expectation.of(plan), share=share)
        return next(n for n, window in enumerate(windows) if judge.look(window) is not None) - 5

    assert looks(1.0) == 2  # 1.25 windows
    assert looks(0.5) == 3
