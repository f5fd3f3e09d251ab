"""Steady-state rates from completions made by hand."""

from __future__ import annotations

import pytest

from planner.executor.observe.measure import (
    Completion,
    Progress,
    WorkerLog,
    latest_loss,
    progress_reporter,
    steady_state,
)


def test_start_up_and_drain_do_not_count() -> None:
    slow = [Completion(10.0 * i, 1.0 * i) for i in range(5)]  # start-up: a unit every 10 s
    steady = [Completion(40.0 + i, 4.0 + 0.75 * i) for i in range(1, 41)]  # then one every second, 75% busy
    fast = [Completion(80.0 + 0.1 * i, 34.0 + 0.1 * i) for i in range(1, 4)]  # drain
    result = steady_state([*slow, *steady, *fast], start_up=6, drain=3, per_round=1)
    assert result.units_per_s == pytest.approx(1.0)
    assert result.busy_share == pytest.approx(0.75)


def test_the_window_of_a_synchronous_schedule_holds_whole_minibatches() -> None:
    """Four backwards in a burst, then a pause: only whole periods give the rate."""
    completions = [Completion(10.0 * (i // 4) + i % 4, 0.0) for i in range(40)]
    for start_up in (1, 2, 3, 4, 5):
        assert steady_state(completions, start_up, drain=0, per_round=4).units_per_s == pytest.approx(0.4)


def test_too_short_a_run_measures_nothing() -> None:
    assert steady_state([Completion(1.0, 0.5)], 2, 2, 1).units_per_s == 0.0
    assert steady_state([], 2, 2, 0).units_per_s == 0.0


def test_progress_tells_the_loss_of_the_newest_minibatch_summed_over_its_parts() -> None:
    log = WorkerLog(losses=[(0, 1.0), (0, 2.0), (1, 0.25), (1, 0.5)])
    assert latest_loss(log) == 0.75
    reports: list[Progress] = []
    report = progress_reporter(reports.append, minibatches=5, minibatches_per_update=2, minibatch_size=8)
    for newest in (0, 2, 4):
        log.losses[:] = [(newest - 1, 9.0), (newest, 0.25), (newest, 0.5)]
        report(log)
    assert [r.minibatch for r in reports] == [2, 4, 5]
    assert reports[0].samples_per_s is None
    assert reports[-1].seconds_left == 0.0
