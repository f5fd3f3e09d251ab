"""Runs of microbatches whose lengths vary, against the same events computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner.analysis.given_plan import price
from planner.formats.cluster import flat_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.schedule.registry import find
from planner.simulator.simulate_plan import simulate, simulated_s
from tests.lengths import LINEAR, QUADRATIC, cost_at, varying_profile
from tests.samples import layer

LENGTHS = [13, 90, 100, 7, 55, 41, 22, 68, 34, 97, 5, 76]
SECONDS = (1.0, 2.0), (3.0, 4.0)  # forward and backward at the greatest length, by stage
SHARES = (LINEAR, QUADRATIC)


def plan_of(
    schedule: str, microbatches: int, replicas: Sequence[int] = (1, 1), output_bytes: int = 1
) -> Plan:
    layers = [
        layer(f"l{n}", *seconds, output_bytes=output_bytes) for n, seconds in enumerate(SECONDS)
    ]
    layers[-1] = layers[-1].model_copy(update={"outputs": ()})
    profile = varying_profile(layers, SHARES, LENGTHS)
    stages = tuple(OwnStage(layers=(f"l{n}",), replicas=each) for n, each in enumerate(replicas))
    own = OwnPlan(stages=stages, schedule=find(schedule), microbatches=microbatches)
    return price(profile, flat_cluster(sum(replicas), 1e12), own)


def takes(stage: int, backward: bool, number: int) -> float:
    return SECONDS[stage][backward] * cost_at(SHARES[stage], LENGTHS[number % len(LENGTHS)])


def flushed_s(first: int, microbatches: int) -> float:
    """The seconds of a minibatch on two stages under 1F1B with a flush, by its definition."""
    orders = [[(False, 0)], []]  # per stage, whether backward, and which microbatch
    for number in range(microbatches):
        orders[0] += [(False, number + 1)] * (number + 1 < microbatches) + [(True, number)]
        orders[1] += [(False, number), (True, number)]
    ends: dict[tuple[int, bool, int], float] = {}
    while len(ends) < 4 * microbatches:
        for stage, order in enumerate(orders):
            done = sum(key[0] == stage for key in ends)
            if done == len(order):
                continue
            backward, number = order[done]
            needs = [(1 - stage, backward, number)] if backward != (stage == 1) else []
            if all(each in ends for each in needs):
                before = max((ends[each] for each in needs), default=0.0)
                own = max((end for key, end in ends.items() if key[0] == stage), default=0.0)
                ends[stage, backward, number] = max(before, own) + takes(
                    stage, backward, first + number
                )
    return max(ends.values())


@pytest.mark.parametrize("microbatches", [2, 3, 4, 6])
def test_a_flushed_pipeline_of_uneven_microbatches(microbatches: int) -> None:
    plan = plan_of("1f1b-flush", microbatches)
    assert plan.lengths is not None
    assert [row for (row,) in plan.lengths.microbatches] == LENGTHS
    # The second minibatch is the first that counts, and there are at least four.
    counted = range(1, 1 + max(4, len(LENGTHS) // microbatches))
    mean = sum(flushed_s(number * microbatches, microbatches) for number in counted) / len(counted)
    assert simulated_s(plan) == pytest.approx(mean)
    assert plan.predicted.seconds_per_minibatch == pytest.approx(simulated_s(plan))
    timeline = simulate(plan, minibatches=3)
    whole = sum(flushed_s(number * microbatches, microbatches) for number in range(3))
    assert max(event.end_s for event in timeline.events.rows()) == pytest.approx(whole)
    for event in timeline.events.rows():
        if event.kind in ("forward", "backward"):
            number = event.minibatch * microbatches + event.microbatch
            assert event.end_s - event.start_s == pytest.approx(
                takes(event.stage, event.kind == "backward", number)
            )


def test_messages_are_as_long_as_their_microbatch() -> None:
    plan = plan_of("1f1b-flush", 4, output_bytes=10**12)
    (transfer,) = plan.transfers
    mean = sum(cost_at(LINEAR, length) for length in LENGTHS) / len(LENGTHS)
    assert transfer.output_bytes == pytest.approx(mean * 10**12)
    sent = [
        event
        for event in simulate(plan, minibatches=3).events.rows()
        if event.kind == "send_activation"
    ]
    assert len(sent) == len(LENGTHS)
    for event in sent:
        number = event.minibatch * 4 + event.microbatch
        assert event.end_s - event.start_s == pytest.approx(
            cost_at(LINEAR, LENGTHS[number]), rel=1e-6
        )


def test_replicas_of_1f1b_take_the_minibatches_in_turn_and_wait_for_the_longest() -> None:
    layers = [layer("only", 1.0, 2.0, weight_bytes=1)]
    profile = varying_profile(layers, [LINEAR], LENGTHS)
    own = OwnPlan(
        stages=(OwnStage(layers=("only",), replicas=2),), schedule=find("1f1b"), microbatches=1
    )
    plan = price(profile, flat_cluster(2, 1e15), own)
    rounds = (
        3 * max(cost_at(LINEAR, LENGTHS[n]), cost_at(LINEAR, LENGTHS[n + 1]))
        for n in range(0, len(LENGTHS), 2)
    )
    assert plan.predicted.seconds_per_minibatch == pytest.approx(
        sum(rounds) / len(LENGTHS), rel=1e-3
    )


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "gpipe", "zb-h1"])
def test_no_schedule_is_faster_than_at_its_mean_costs(schedule: str) -> None:
    plan = plan_of(schedule, 1 if schedule == "1f1b" else 4)
    alike = plan.model_copy(update={"lengths": None})
    assert simulated_s(plan) >= simulated_s(alike) * (1 - 1e-3)
    busiest = sum(
        takes(1, backward, n) for backward in (False, True) for n in range(len(LENGTHS))
    ) / len(LENGTHS)
    assert simulated_s(plan) >= plan.microbatches * busiest * (1 - 1e-3)
