"""When a run moves to another plan: where that pays, and not again soon."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from planner.executor.run.replan import Replanner
from planner.formats.cluster import DeviceKind, flat_cluster
from planner.formats.drift import Corrected, Drift
from planner.formats.plan import Plan
from planner.formats.profile import save_profile
from planner.options.training import DriftOptions, RunOptions
from planner.workers.job import Job
from tests.executor.processes import run_jobs
from tests.executor.sleeping import (
    sleeping_plan,
    sleeping_profile,
    slow_down,
    write_sleeping,
)
from tests.simulator.plans import equal_layers, plan_of

MINIBATCHES = 10_000
WINDOW = 50
HALF = WINDOW // 2
MEASURED = 1 / 10.0  # samples per second of the plan that is run


@pytest.fixture
def plan() -> Plan:
    return plan_of(equal_layers(4), (1, 1, 1, 1), flat_cluster(4, 1e9), schedule="1f1b-flush")


def replanner(plan: Plan, cost_s: float, gain: float = 2.0) -> Replanner:
    options = DriftOptions(
        replan=True, profile="profile.json", replan_gain=gain, drift_window=WINDOW
    )
    made = Replanner(Job(model="model.py", plan=plan, drift=options), 0, MINIBATCHES, HashStore())
    made.expect_cost(cost_s)
    return made


def drift(plan: Plan, before_s: float, after_s: float) -> Drift:
    """A drift after which this plan and another one take so many seconds per minibatch."""
    planned_s = plan.predicted.seconds_per_minibatch
    return Drift(
        since=100,
        seen=200,
        config="1-1-1-1",
        planned_samples_per_s=1 / planned_s,
        measured_samples_per_s=1 / before_s,
        expected_samples_per_s=1 / before_s,
        better_config="1-1-2",
        better_samples_per_s=1 / after_s,
    )


def answer(better: Plan) -> Corrected:
    return Corrected(expected_s=10.0, better=better)


def confirm(made: Replanner, end: int) -> None:
    """Let windows pass until it is decided, after that with minibatch `end`."""
    for number in (4, 3, 2, 1, 0):
        made.look(end - number * HALF, MEASURED)


def ends(made: Replanner) -> list[int]:
    """Where training ends the plan."""
    return [point for point in range(1, MINIBATCHES) if made.ends_at(point)]


def test_it_moves_where_nobody_has_passed(plan: Plan) -> None:
    made = replanner(plan, cost_s=100.0)
    assert not any(made.ends_at(point) for point in range(301))  # workers are there already
    made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=False)
    confirm(made, 200)
    assert ends(made) == [310]
    assert made.next_plan() == plan


def test_all_workers_end_at_the_same_minibatch(plan: Plan) -> None:
    made = replanner(plan, cost_s=100.0)
    made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=False)
    confirm(made, 200)
    assert ends(made) == ends(made) == [210]


def test_what_is_clear_is_decided_at_once(plan: Plan) -> None:
    made = replanner(plan, cost_s=100.0)
    made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=True)
    made.look(200, MEASURED)
    assert ends(made) == [210]


def test_what_has_not_lasted_as_long_as_a_move_is_waited_for(plan: Plan) -> None:
    lasted_s = 1000.0  # 100 minibatches of 10 s
    made = replanner(plan, cost_s=1.01 * lasted_s)
    made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=True)
    made.look(200, MEASURED)
    assert not made.ends_at(210)
    for end in (225, 250, 275, 300):
        made.look(end, MEASURED)
    assert ends(made) == [310]


def test_what_does_not_pay_is_not_done(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    saved_s = (MINIBATCHES - 200) * 5.0
    made = replanner(plan, cost_s=saved_s / 1.9)
    with caplog.at_level(logging.WARNING):
        made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=False)
        confirm(made, 200)
    assert ends(made) == []
    assert "the run does not move, because a move pays from 2 times its cost on" in caplog.text


def test_towards_the_end_nothing_pays(plan: Plan) -> None:
    made = replanner(plan, cost_s=30.0)
    made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=False)
    confirm(made, MINIBATCHES - 10)
    assert ends(made) == []


@pytest.mark.parametrize(("passed_s", "expected"), [(69.0, []), (71.0, [410])])
def test_after_a_move_the_next_is_ten_times_its_cost_away(
    plan: Plan, passed_s: float, expected: list[int]
) -> None:
    made = replanner(plan, cost_s=1.0)
    with mock.patch("planner.executor.run.replan.time.monotonic") as now:
        now.return_value = 1000.0
        made.moved(plan, 200, seconds=7.0)
        made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=False)
        now.return_value += passed_s
        confirm(made, 400)
    assert ends(made) == expected


def test_a_plan_that_is_no_better_any_more_is_forgotten(plan: Plan) -> None:
    made = replanner(plan, cost_s=1.0)
    made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=False)
    made.consider(drift(plan, 10.0, 5.0), None, clear=False)
    confirm(made, 200)
    assert ends(made) == []


def test_what_has_gone_two_windows_later_was_noise(plan: Plan) -> None:
    made = replanner(plan, cost_s=1.0)
    made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=False)
    made.look(100, MEASURED)
    made.look(150, MEASURED)
    made.consider(drift(plan, 10.0, 5.0), None, clear=False)  # it has recovered
    made.look(200, MEASURED)
    made.look(250, MEASURED)
    assert ends(made) == []


def test_a_move_waits_while_predictions_err_by_more_than_it_gains(plan: Plan) -> None:
    """Of a run that is not as fast as expected of its own plan, something else takes the time."""
    made = replanner(plan, cost_s=1.0)
    made.consider(drift(plan, 10.0, 9.0), answer(plan), clear=True)
    made.look(200, 0.8 * MEASURED)
    assert not made.ends_at(210)
    made.look(225, 1.2 * MEASURED)
    assert not made.ends_at(240)
    made.look(250, 0.95 * MEASURED)
    assert ends(made) == [260]


def smaller(plan: Plan) -> Plan:
    """A plan for the same minibatches that leaves out workers 2 and 3."""
    two = plan_of(equal_layers(2), (1, 1), flat_cluster(2, 1e9), schedule="1f1b-flush")
    return two.model_copy(update={"cluster": plan.cluster})


def test_slow_workers_are_left_out(plan: Plan) -> None:
    made = replanner(plan, cost_s=1.0)
    made.consider(drift(plan, 10.0, 5.0), answer(smaller(plan)), clear=True)
    made.look(200, MEASURED)
    assert ends(made) == [210]

    made.moved(smaller(plan), 210, seconds=1.0)
    assert made.moves[0].left_out == (2, 3)


def test_each_time_it_takes_longer_to_take_a_worker_in_again(plan: Plan) -> None:
    """It may be slow only while it has something to do."""
    made = replanner(plan, cost_s=1e-9)
    took = []
    for _ in range(4):
        made.moved(smaller(plan), 200, seconds=0.0)
        made.consider(drift(plan, 10.0, 5.0), answer(plan), clear=True)
        looks = 1
        made.look(200, MEASURED)
        while not made._decided:
            made.look(200, MEASURED)
            looks += 1
            assert looks < 100
        took.append(looks)
        made.moved(plan, 250, seconds=0.0)
    assert took == [1, 5, 13, 29]


def test_nobody_is_left_out_who_could_not_measure_itself(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    made = replanner(plan, cost_s=1.0)
    names = [DeviceKind(count=2, name=name) for name in ("v100", "t4")]
    cluster = smaller(plan).cluster.model_copy(update={"kinds": tuple(names)})
    kinds = smaller(plan).model_copy(update={"cluster": cluster})
    with caplog.at_level(logging.WARNING):
        made.consider(drift(plan, 10.0, 5.0), answer(kinds), clear=False)
        confirm(made, 200)
    assert ends(made) == []
    assert "it has work for 2 of 4 workers, and its devices are of several kinds" in caplog.text


def test_a_worker_that_is_left_out_settles_nothing(plan: Plan) -> None:
    store = HashStore()
    options = DriftOptions(replan=True, profile="profile.json", drift_window=WINDOW)
    job = Job(model="model.py", plan=plan, drift=options)
    trains, idle = (Replanner(job, rank, MINIBATCHES, store) for rank in (0, 3))
    for each in (trains, idle):
        each.moved(smaller(plan), 200, seconds=1.0)
    assert [*trains.points(200, 240)] == [210, 220, 230]

    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(idle.await_ending(210)), daemon=True)
    thread.start()
    trains._settle(plan, 203)
    thread.join(10)
    assert found == [True]
    assert trains.ends_at(210)


@pytest.mark.slow
def test_a_run_moves_away_from_a_slow_device(tmp_path: Path) -> None:
    path = write_sleeping(tmp_path)
    profile = sleeping_profile(path)
    save_profile(profile, tmp_path / "profile.json")
    options = DriftOptions(
        drift_window=10, profile=str(tmp_path / "profile.json"), replan=True, replan_gain=0.01
    )
    plan = sleeping_plan(profile, (1, 1), "1f1b-flush", 6)
    job = Job(model=str(path), plan=plan, steps=200, drift=options, run_options=RunOptions())
    slow_down(tmp_path, [(1, 2 * 6 * 15, 10**9, 2.5)])

    (result,) = run_jobs([job], tmp_path)

    first = result.moves[0]
    assert first.before == "1-1 (2+3 layers)"
    assert first.after in ("1-1 (3+2 layers)", "1-1 (1+4 layers)")
    assert [loss.minibatch for loss in result.losses] == list(range(200))
