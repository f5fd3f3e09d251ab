"""Simulations of plans for lengths that vary: what each microbatch takes, and what is told
of it.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest

from benchmarks.testbed.predict import given_plan
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.reporting.tables.runs import run_report
from planner.simulator.excerpt import only_minibatches
from planner.simulator.simulate_plan import simulate, simulate_recorded, simulated_s
from planner.simulator.summary import summarize
from tests.lengths import cost_at, varying_profile
from tests.samples import layer
from tests.simulator.timing_errors import timing_error

# of each layer, for 1, the length, and its square
SHARES = ((0.5, 0.5, 0.0), (0.0, 1.0, 0.0), (0.1, 0.0, 0.9))
Order = Literal["random", "buckets"]


def plan_for(schedule: str, microbatches: int, order: Order = "random") -> Plan:
    """Of three layers of 1 s forward and 2 s backward at 100 words, the last of them on two
    workers.
    """
    layers = [layer(name, 1.0, 2.0, output_bytes=0 if name == "c" else 100) for name in "abc"]
    draw = random.Random(3)
    profile = varying_profile(
        layers, SHARES, [draw.randint(2, 100) for _ in range(64)], order, microbatch_size=4
    )
    return given_plan(
        profile, flat_cluster(4, 1000.0), [1, 1, 1], (1, 1, 2), schedule, microbatches
    )


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 1), ("1f1b-flush", 4), ("gpipe", 3), ("2bw", 4)]
)
def test_each_microbatch_takes_what_its_length_costs(schedule: str, microbatches: int) -> None:
    plan = plan_for(schedule, microbatches)
    assert plan.lengths is not None
    timeline = simulate(plan)
    assert timeline.length_names == ("words",)
    for event in timeline.events.rows():
        if event.kind not in ("forward", "backward"):
            continue
        number = event.minibatch * microbatches + event.microbatch
        (words,) = plan.lengths.microbatches[number % len(plan.lengths.microbatches)]
        cost = cost_at(SHARES[event.stage], words)
        assert event.end_s - event.start_s == pytest.approx(
            cost * (1 if event.kind == "forward" else 2)
        )
        assert timeline.lengths[number] == (event.minibatch, event.microbatch, words)


@pytest.mark.parametrize("order", ["random", "buckets"])
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("1f1b-flush", 4), ("2bw", 4)])
def test_the_summary_is_of_each_length_once(schedule: str, microbatches: int, order: Order) -> None:
    """So its pace is the plan's, though nothing repeats in the middle of the run."""
    plan = plan_for(schedule, microbatches, order)
    summary = summarize(simulate(plan))
    assert summary.steady
    assert summary.seconds_per_minibatch == pytest.approx(
        plan.predicted.seconds_per_minibatch, rel=0.005
    )
    assert sum(summary.bubble_causes.values()) == pytest.approx(summary.bubble_share)
    even_s = simulated_s(plan.model_copy(update={"lengths": None}))
    assert f"{plan.predicted.seconds_per_minibatch / even_s - 1:+.1%} of time" in run_report(
        summary, plan
    )
    assert plan.predicted.seconds_per_minibatch > (1 - 1e-9) * even_s


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("1f1b-flush", 4)])
def test_a_run_is_simulated_with_its_own_lengths(schedule: str, microbatches: int) -> None:
    plan = plan_for(schedule, microbatches)
    assert plan.lengths is not None
    draw = random.Random(9)
    others = tuple((draw.randint(2, 100),) for _ in range(97 * microbatches))
    run = plan.model_copy(
        update={"lengths": plan.lengths.model_copy(update={"microbatches": others})}
    )
    whole = simulate(run, 90)
    measured = only_minibatches(whole, range(70, 80)).model_copy(
        update={"source": "measured", "minibatches": 90}
    )
    # As a recorder writes them: those of the minibatches that it recorded.
    own = tuple(row for row in measured.lengths if 70 <= row[0] < 80)
    assert len(own) == 10 * microbatches
    measured = measured.model_copy(update={"lengths": own})
    simulated = simulate_recorded(plan, measured)
    assert simulated.lengths == own
    longest = {
        (e.kind, e.stage, e.minibatch, e.microbatch): e.end_s - e.start_s
        for e in measured.events.rows()
    }
    for event in simulated.events.rows():
        if event.kind in ("forward", "backward"):
            expected = longest[event.kind, event.stage, event.minibatch, event.microbatch]
            assert event.end_s - event.start_s == pytest.approx(expected)
    assert timing_error(simulated, measured).events == 10 * microbatches * 3 * 2
