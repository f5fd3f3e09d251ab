"""Updates after several minibatches per replica, in the simulation."""

from __future__ import annotations

import pytest

from planner.analysis.compare_runs import timing_error
from planner.errors import InputError
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.plan.shape import check_accumulate
from planner.simulator.simulate_plan import only_minibatches, simulate, simulate_recorded, simulated_s
from planner.simulator.summary import summarize
from tests.samples import layer
from tests.simulator.plans import equal_layers, plan_of


def alone(replicas: int = 1, weight_bytes: int = 0) -> Plan:
    """One stage: forward 1 s, backward 2 s, update 3 s, adding to gradients 0.5 s, on links of 4 bytes/s."""
    one = layer("l0", 1.0, 2.0, weight_bytes=weight_bytes)
    one = one.model_copy(update={"update_s": 3.0, "accumulate_s": 0.5})
    return plan_of([one], (replicas,), flat_cluster(replicas, 4.0))


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
def test_one_worker_by_hand(accumulate: int) -> None:
    """K forwards and backwards, all but the first of which add up, and one update."""
    expected = 3 + 0.5 * (accumulate - 1) / accumulate + 3 / accumulate
    assert simulated_s(alone(), accumulate) == pytest.approx(expected)
    timeline = simulate(alone(), accumulate=accumulate)
    assert timeline.accumulate == accumulate
    assert summarize(timeline).seconds_per_minibatch == pytest.approx(expected)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_replicas_reduce_once_per_update(accumulate: int) -> None:
    """48 bytes over a ring of two: 12 s, the first parts of which hide behind the one backward that completes them."""
    plan = alone(2, weight_bytes=48)
    timeline = simulate(plan, 16 * accumulate, accumulate)
    reduced = [e for e in timeline.events.rows() if e.kind == "all_reduce" and e.rank == 0]
    assert len(reduced) == 8
    waits_s = reduced[-1].end_s - reduced[-1].start_s
    assert waits_s >= 12
    assert simulated_s(plan, accumulate) <= simulated_s(plan) / accumulate + 3.5


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (3, 2, 1)])
def test_fewer_updates_are_no_slower(replicas: tuple[int, ...]) -> None:
    layers = [each.model_copy(update={"update_s": 1.0}) for each in equal_layers(len(replicas), weight_bytes=40)]
    plan = plan_of(layers, replicas, flat_cluster(sum(replicas), 20.0))
    assert simulated_s(plan, 4) < simulated_s(plan)
    for accumulate in (2, 4):
        exact = summarize(simulate(plan, accumulate=accumulate)).seconds_per_minibatch
        assert simulated_s(plan, accumulate) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("part", [range(40), range(260, 300), range(201, 231)])
def test_a_part_of_a_run_lies_where_its_own_simulation_does(part: range) -> None:
    layers = [each.model_copy(update={"update_s": 1.0}) for each in equal_layers(3, 10, 10)]
    plan = plan_of(layers, (2, 1, 1))
    recorded = only_minibatches(simulate(plan, 300, 3), part)
    measured = recorded.model_copy(update={"source": "measured", "minibatches": 300})
    simulated = simulate_recorded(plan, measured)
    assert timing_error(simulated, measured).worst_share < 1e-6
    rounds = {(e.rank, e.minibatch) for e in measured.events.rows() if e.kind == "update"}
    assert {(e.rank, e.minibatch) for e in simulated.events.rows() if e.kind == "update"} == rounds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush", "2bw"])
def test_schedules_that_divide_a_minibatch_refuse(schedule: str) -> None:
    plan = plan_of(equal_layers(2), (1, 1), schedule=schedule, microbatches=2)
    with pytest.raises(InputError, match=f"`accumulate=2` is for the schedule 1f1b.* is {schedule}"):
        simulate(plan, accumulate=2)
    with pytest.raises(InputError, match="`accumulate=0` never updates"):
        check_accumulate(plan, 0)
