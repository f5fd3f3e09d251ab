"""What is said of drifts and moves."""

from __future__ import annotations

from planner.formats.cluster import flat_cluster
from planner.formats.drift import Drift, Move, WorkerDrift
from planner.workers.failures import stage_of, worker_name
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from tests.simulator.plans import equal_layers, plan_of


def test_a_move_says_who_is_left_out_and_who_is_taken_in() -> None:
    move = Move(minibatch=1000, before="1-1-1", after="1-1", seconds=1.5, left_out=(2,))
    assert str(move) == (
        "after minibatch 1,000 the run moved from 1-1-1 to 1-1, and stood still for 1.50 s; it "
        "leaves out worker 2"
    )
    back = Move(minibatch=1000, before="1-1", after="1-1-1-1", seconds=1.5, taken_in=(0, 2))
    assert str(back).endswith("; it takes in workers 0, 2 again")


def test_a_worker_without_a_stage_is_compared_with_itself() -> None:
    drift = Drift(
        since=10,
        seen=20,
        workers=(WorkerDrift(rank=2, stage=None, host="b", ratio=0.25),),
        config="1-1",
        planned_samples_per_s=10.0,
        measured_samples_per_s=10.0,
    )
    expected = "worker 2 on host b, which is left out, takes 0.25 times as long as when it was"
    assert str(drift).startswith(expected)


def test_a_failure_of_a_worker_that_is_left_out_names_no_stage() -> None:
    plan = plan_of(equal_layers(2), (1, 1), flat_cluster(2, 1e9), schedule="1f1b-flush")
    job = Job(model="model.py", plan=plan)
    heartbeat = Heartbeat()
    assert worker_name(1, stage_of(job, 1, heartbeat.read())) == "worker 1 (stage 1)"
    heartbeat.hold(None)
    assert worker_name(1, stage_of(job, 1, heartbeat.read())) == "worker 1"
    heartbeat.hold(0)
    assert worker_name(1, stage_of(job, 1, heartbeat.read())) == "worker 1 (stage 0)"
