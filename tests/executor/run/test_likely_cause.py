"""Why a run was slower than predicted, from what its workers measured."""

from __future__ import annotations

import pytest

from planner.executor.run.lifecycle import likely_cause
from planner.formats.plan import Plan
from planner.workers.job import WorkerReport
from tests.executor.plans import make_plan
from tests.samples import layer, profile


def _report(rank: int, busy_share: float) -> WorkerReport:
    return WorkerReport(
        rank=rank,
        stage=rank,
        busy_share=busy_share,
        samples_per_s=1.0,
        peak_memory_bytes=0,
        predicted_memory_bytes=0,
        weight_versions=1,
    )


@pytest.fixture
def plan() -> Plan:
    """Two stages that compute for 1 s each per minibatch of 8 samples."""
    layers = [layer(name, 0.4, 0.5, update_s=0.1) for name in "ab"]
    return make_plan(profile(*layers).model_copy(update={"microbatch_size": 8}), (1, 1))


def test_nothing_is_said_of_a_run_that_is_about_as_fast_as_predicted(plan: Plan) -> None:
    assert likely_cause(plan, [_report(0, 1.0), _report(1, 1.0)], 8.0, 7.0) is None


def test_slow_computing_and_long_waiting_are_told_apart(plan: Plan) -> None:
    slow = likely_cause(plan, [_report(0, 1.0), _report(1, 0.9)], 8.0, 4.0)
    assert slow is not None
    assert slow.startswith("stages computed 100% slower than profiled: the profile is of one process alone")
    assert "`processes=2`" in slow
    waiting = likely_cause(plan, [_report(0, 0.5), _report(1, 0.5)], 8.0, 4.0)
    assert waiting is not None
    assert waiting.startswith("workers waited longer for messages")
    # Slower by a fifth, which is little of a run that takes four times as long.
    both = likely_cause(plan, [_report(0, 0.3), _report(1, 0.2)], 8.0, 2.0)
    assert both == waiting


def test_a_profile_with_company_is_not_to_blame(plan: Plan) -> None:
    device = plan.device.model_copy(update={"processes": 2})
    slow = likely_cause(plan.model_copy(update={"device": device}), [_report(0, 1.0), _report(1, 1.0)], 8.0, 4.0)
    assert slow is not None
    assert slow.endswith("something else uses the devices, or they run at another clock; profile again")
