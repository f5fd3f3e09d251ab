"""Workers that a plan leaves out, and what they measure themselves by."""

from __future__ import annotations

import pytest

import planner
from planner.formats.cluster import DeviceKind, flat_cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.plan.left_out import expected_s, left_out, measured_stage, why_nobody
from tests.samples import profile
from tests.simulator.plans import equal_layers


@pytest.fixture
def plan() -> Plan:
    """Stages of 3 and 1 layers on ranks 0 and 1 of three."""
    model = profile(*equal_layers(4))
    return planner.price(model, flat_cluster(3, 1e9), (3, 1), schedule="1f1b-flush", microbatches=2)


def with_speeds(plan: Plan, *speeds: float) -> Plan:
    kinds = tuple(DeviceKind(count=1, speed=speed) for speed in speeds)
    return replace(plan, cluster=replace(plan.cluster, kinds=kinds))


def test_ranks_without_a_stage_are_left_out(plan: Plan) -> None:
    assert left_out(plan, 2) == ()
    assert left_out(plan, 3) == (2,)
    assert left_out(plan, 4) == (2, 3)


def test_the_cheapest_stage_is_measured(plan: Plan) -> None:
    assert measured_stage(plan) == 1
    assert expected_s(plan, 2) == plan.stages[1].forward_s + plan.stages[1].backward_s


def test_a_slow_device_is_expected_to_be_slow(plan: Plan) -> None:
    usual = expected_s(plan, 2)
    assert expected_s(with_speeds(plan, 1.0, 1.0, 0.25), 2) == pytest.approx(4 * usual)
    # The plan's seconds are those of a device of half the speed.
    assert expected_s(with_speeds(plan, 1.0, 0.5, 0.25), 2) == pytest.approx(2 * usual)


def test_nobody_is_left_out_who_has_nothing_to_compare_itself_with(plan: Plan) -> None:
    assert why_nobody(plan) == ""
    assert why_nobody(with_speeds(plan, 1.0, 0.5, 0.25)) == ""
    names = (DeviceKind(count=1, name="t4"), DeviceKind(count=2, name="v100"))
    named = replace(plan, cluster=replace(plan.cluster, kinds=names))
    assert why_nobody(named) == "its devices are of several kinds"
    divided = replace(plan, stages=(replace(plan.stages[0], tensor=2), *plan.stages[1:]))
    assert why_nobody(divided) == "its ranks shard layers"
