"""Runs in numbers, against published formulas and by hand."""

from __future__ import annotations

import pytest

from planner.formats.cluster import flat_cluster
from planner.formats.timeline import Event, Events
from planner.simulator.simulate_plan import simulate
from planner.simulator.summary import summarize
from tests.samples import layer
from tests.simulator.plans import equal_layers, plan_of
from tests.timelines import by_hand


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_the_bubble_of_gpipe_is_the_published_one(stages: int, microbatches: int) -> None:
    """(K - 1) / (M + K - 1) (GPipe, section 2.3)."""
    plan = plan_of(equal_layers(stages), (1,) * stages, schedule="gpipe", microbatches=microbatches)
    summary = summarize(simulate(plan, 8))
    expected = (stages - 1) / (microbatches + stages - 1)
    assert summary.bubble_share == pytest.approx(expected)
    assert summary.bubble_share_of_run == pytest.approx(expected)
    assert summary.seconds_per_minibatch == pytest.approx(3 * (microbatches + stages - 1))
    assert summary.samples_per_s == pytest.approx(4 * microbatches / summary.seconds_per_minibatch)


def test_asynchronous_pipelines_have_no_bubble_but_at_their_ends() -> None:
    summary = summarize(simulate(plan_of(equal_layers(4), (1,) * 4), 40))
    assert summary.bubble_share == pytest.approx(0, abs=1e-9)
    assert summary.start_up_s == pytest.approx(4 * 3)
    # The last forward of stage 0 ends 3 (K - 1) + 1 s into its minibatch's backwards at the latest.
    assert summary.bubble_share_of_run == pytest.approx(1 - 40 * 3 / summary.seconds)
    assert 0 < summary.drain_s < 12
    assert summary.busiest == "the computation of worker 0"
    assert summary.busiest_share == pytest.approx(1)


def test_a_stage_that_works_off_a_pile_does_not_set_the_pace() -> None:
    """Stage 0 takes 4 s per minibatch; stage 1, before which ten pile up, finishes one every 3.9 s
    all the time.
    """
    plan = plan_of([layer("a", 1, 3, output_bytes=1), layer("b", 1.3, 2.6)], (1, 1), depths=(10, 1))
    summary = summarize(simulate(plan, 48))
    assert summary.seconds_per_minibatch == pytest.approx(4)
    assert max(worker.compute_share for worker in summary.workers) <= 1 + 1e-9


def test_the_bubble_by_cause_by_hand() -> None:
    """Worker 1 waits until worker 0 has computed, for its message, and at the end; worker 0 for
    both parts of the way.

    Then a sum of 1 s after 0.5 s in which the other had not joined, and 0.25 s for which nothing is
    to be seen.
    """
    more = (
        Event(0, "all_reduce", 0, 1, 0, 7.375, 8.375),
        Event(0, "update", 0, 1, 0, 8.375, 8.5),
        Event(0, "forward", 0, 1, 0, 8.75, 9.75),
    )
    summary = summarize(by_hand(*more))
    causes = summary.bubble_causes
    first, second = 3.5 + 0.5, 1.0 + (9.75 - 4.625)
    assert causes["workers"] == pytest.approx((first + second) / (2 * 9.75))
    assert causes["messages"] == pytest.approx((0.25 + 0.5) / (2 * 9.75))
    assert causes["all-reduces"] == pytest.approx(1.0 / (2 * 9.75))
    assert causes["other"] == pytest.approx(0.25 / (2 * 9.75))
    assert sum(causes.values()) == pytest.approx(summary.bubble_share)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "gpipe", "zb-h1"])
def test_the_causes_add_up_to_the_bubble(schedule: str) -> None:
    layers = [layer(name, 1, 2, output_bytes=5, weight_bytes=7) for name in "abc"]
    microbatches = 1 if schedule == "1f1b" else 6
    plan = plan_of(
        layers, (2, 1, 1), flat_cluster(4, 10.0), schedule=schedule, microbatches=microbatches
    )
    summary = summarize(simulate(plan))
    causes = summary.bubble_causes
    assert sum(causes.values()) == pytest.approx(summary.bubble_share)
    assert causes["messages"] > 0
    assert causes["all-reduces"] > 0
    assert causes["other"] == pytest.approx(0, abs=1e-9)


def test_a_short_run_has_no_steady_state() -> None:
    summary = summarize(by_hand())
    assert not summary.steady
    assert (summary.steady_from_s, summary.steady_to_s, summary.seconds_per_minibatch) == (
        0.0,
        6.875,
        6.875,
    )
    first, second = summary.workers
    assert first.compute_share == pytest.approx(3.125 / 6.875)
    assert first.send_share == pytest.approx(0.5 / 6.875)
    # nobody says what its link did, but its own end
    assert second.send_share == pytest.approx(0.25 / 6.875)
    assert (first.peak_bytes, first.limit_bytes) == (300, 1000)
    assert (second.peak_bytes, second.limit_bytes) == (None, None)
    assert summary.start_up_s == 6.75
    assert summary.drain_s == 5.875


def test_a_split_backward_ends_with_its_second_part() -> None:
    rows = [
        Event(0, "forward", 0, 0, 0, 0.0, 1.0),
        Event(0, "backward_input", 0, 0, 0, 1.0, 2.0),
        Event(0, "backward_weight", 0, 0, 0, 2.0, 3.5),
    ]
    split = by_hand().model_copy(update={"ranks": ((0,),), "events": Events.of(rows)})
    assert summarize(split).start_up_s == 3.5


def test_a_run_of_nothing() -> None:
    empty = by_hand().model_copy(update={"events": Events.of(())})
    summary = summarize(empty)
    assert summary.samples_per_s is None
    assert summary.busiest_share == 0
