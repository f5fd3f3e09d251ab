"""Steady-state rates from completions made by hand; the user's hook follows a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.executor.observe.progress import (
    Completion,
    Progress,
    Reporter,
    WorkerLog,
    latest_loss,
    steady_state,
)
from planner.options.training import TrainingOptions
from planner.plan.shape import shape_of
from planner.simulator.simulate_plan import simulate
from tests.executor import eager
from tests.executor.models import EVALUATION, write_model
from tests.executor.plans import make_plan, structural_profile
from tests.samples import layer, profile

HOOK = """
def on_update(minibatch, loss, metrics):
    import json
    with open(FILE, "a") as file:
        file.write(json.dumps([minibatch, loss, metrics]) + "\\n")
"""


def test_the_hook_is_told_of_updates_and_evaluations(tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    more = EVALUATION + HOOK.replace("FILE", repr(str(told)))
    path = write_model(tmp_path, "language", "sgd", samples=12, more=more)
    plan = make_plan(structural_profile(path, 4), (1, 1))
    result, _ = eager.run_one(path, plan, TrainingOptions(evaluate_every=2), steps=3)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(line[0], bool(line[2])) for line in lines] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (3, True),
    ]
    assert [line[1] for line in lines if not line[2]] == [entry.loss for entry in result.losses]
    assert lines[-1][2] == {"loss": result.evaluations[-1].loss, **result.evaluations[-1].metrics}


def test_start_up_and_drain_do_not_count() -> None:
    slow = [Completion(10.0 * i, 1.0 * i) for i in range(5)]  # start-up: a unit every 10 s
    # then one every second, 75% busy
    steady = [Completion(40.0 + i, 4.0 + 0.75 * i) for i in range(1, 41)]
    fast = [Completion(80.0 + 0.1 * i, 34.0 + 0.1 * i) for i in range(1, 4)]  # drain
    result = steady_state([*slow, *steady, *fast], start_up=6, drain=3, per_round=1)
    assert result.units_per_s == pytest.approx(1.0)
    assert result.busy_share == pytest.approx(0.75)


def test_workers_of_stages_with_more_replicas_leave_out_as_many_minibatches() -> None:
    """While minibatches fill the pipeline, the last stage runs at the pace of forwards."""
    plan = make_plan(
        profile(layer("a", 1, 2, output_bytes=1), layer("b", 1, 2)), (1, 4), depths=(12, 1)
    )
    shape, run = shape_of(plan), simulate(plan, 60)
    assert [shape.unsteady(rank) for rank in (0, 1)] == [(24, 12), (8, 1)]
    rates = [0.0, 0.0]
    for stage, ranks in enumerate(shape.ranks):
        for rank in ranks:
            ends = sorted(
                e.end_s for e in run.events.rows() if (e.rank, e.kind) == (rank, "backward")
            )
            rates[stage] += steady_state(
                [Completion(end, 0.0) for end in ends], *shape.unsteady(rank), 1
            ).units_per_s
    assert rates == pytest.approx([1 / 3, 1 / 3], rel=1e-3)


def test_the_window_of_a_synchronous_schedule_holds_whole_minibatches() -> None:
    """Four backwards in a burst, then a pause: only whole periods give the rate."""
    completions = [Completion(10.0 * (i // 4) + i % 4, 0.0) for i in range(40)]
    for start_up in (1, 2, 3, 4, 5):
        assert steady_state(
            completions, start_up, drain=0, per_round=4
        ).units_per_s == pytest.approx(0.4)


def test_too_short_a_run_measures_nothing() -> None:
    assert steady_state([Completion(1.0, 0.5)], 2, 2, 1).units_per_s == 0.0
    assert steady_state([], 2, 2, 0).units_per_s == 0.0


def test_progress_tells_the_loss_of_the_newest_minibatch_summed_over_its_parts() -> None:
    log = WorkerLog(losses=[(0, 1.0), (0, 2.0), (1, 0.25), (1, 0.5)])
    assert latest_loss(log) == 0.75
    reports: list[Progress] = []
    reporter = Reporter([reports.append], minibatches=5, minibatches_per_update=2, minibatch_size=8)
    for newest in (0, 2, 4):
        log.losses[:] = [(newest - 1, 9.0), (newest, 0.25), (newest, 0.5)]
        reporter.updated(log)
    assert [r.minibatch for r in reports] == [2, 4, 5]
    assert reports[0].samples_per_s is None
    assert reports[-1].seconds_left == 0.0
