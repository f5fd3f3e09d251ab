"""Where all workers are slower, the work is longer, and no device is blamed."""

from __future__ import annotations

import pytest

import planner
from planner.api.corrected import corrected
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.formats.timeline import Timeline
from tests.analysis.test_measured_cluster import run_on, slower
from tests.samples import profile
from tests.simulator.plans import equal_layers

PLANNED = flat_cluster(4, 1e4)


@pytest.fixture(scope="module")
def model() -> Profile:
    layers = equal_layers(16, output_bytes=1000, weight_bytes=10_000_000, saved_bytes=5)
    return profile(*layers)


@pytest.fixture(scope="module")
def plan(model: Profile) -> Plan:
    return planner.solve(model, PLANNED, schedule="1f1b-flush", microbatches=16)


def longer(plan: Plan, *factors: float) -> Timeline:
    """A run whose stages take so many times as long."""
    return run_on(plan, slower(plan.cluster, *(1 / factor for factor in factors)))


def test_longer_samples_alone_are_no_reason_for_another_plan(model: Profile, plan: Plan) -> None:
    answer = corrected(model, plan, longer(plan, 2.0, 2.0, 2.0, 2.0))
    assert answer.better is None
    assert answer.expected_s == pytest.approx(2 * plan.predicted.seconds_per_minibatch, rel=0.05)


def test_layers_leave_a_stage_that_became_longer_than_others(model: Profile, plan: Plan) -> None:
    answer = corrected(model, plan, longer(plan, 1.2, 1.2, 1.8, 1.2))

    better = answer.better
    assert better is not None
    assert [len(stage.layers) for stage in plan.stages] == [4, 4, 4, 4]
    whole = set(plan.stages[2].layers)
    assert not any(whole <= set(stage.layers) for stage in better.stages)
    assert not better.cluster.kinds

    # It can be run, and be corrected again.
    again = corrected(model, better, longer(better, 1.0, 1.0, 1.0, 1.0), longer=answer.longer)
    assert again.better is None
    expected_s = better.predicted.seconds_per_minibatch
    assert again.expected_s == pytest.approx(expected_s, rel=0.05)


def test_a_worker_far_slower_than_longer_work_makes_others_has_a_slow_device(
    model: Profile, plan: Plan
) -> None:
    answer = corrected(model, plan, longer(plan, 1.2, 1.2, 3.0, 1.2))

    better = answer.better
    assert better is not None
    speeds = [better.cluster.kind_of(rank).speed for rank in range(4)]
    assert speeds == pytest.approx([1.0, 1.0, 0.4, 1.0], rel=0.02)
    assert set(answer.longer) == {layer.name for layer in model.layers}
    assert list(answer.longer.values()) == pytest.approx([1.2] * len(model.layers), rel=0.02)
    (slow,) = (stage for stage in better.stages if 2 in stage.ranks)
    assert len(slow.layers) < 4


def test_one_slow_worker_is_a_slow_device(model: Profile, plan: Plan) -> None:
    answer = corrected(model, plan, longer(plan, 1.0, 1.0, 3.0, 1.0))
    assert answer.better is not None
    assert answer.better.cluster.kinds
