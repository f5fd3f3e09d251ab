"""Simulations of the part of a run that was noted."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.formats.plan import Plan
from planner.formats.timeline import Events, Timeline
from planner.simulator.excerpt import only_minibatches
from planner.simulator.simulate_plan import default_minibatches, simulate, simulate_recorded
from planner.simulator.summary import summarize
from tests.simulator.plans import equal_layers, plan_of
from tests.simulator.timing_errors import timing_error


def noted(plan: Plan, minibatches: int, part: range) -> Timeline:
    """A run of which a recorder kept a part, as the recorder writes it."""
    whole = simulate(plan, minibatches)
    return only_minibatches(whole, part).model_copy(
        update={"source": "measured", "minibatches": minibatches}
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("gpipe", 4), ("2bw", 4)])
@pytest.mark.parametrize("part", [range(300), range(40), range(260, 300), range(201, 231)])
def test_a_part_lies_where_its_own_simulation_does(
    part: range, schedule: str, microbatches: int
) -> None:
    """Though that simulates a few hundred minibatches less."""
    layers = equal_layers(3, output_bytes=10, weight_bytes=10, saved_bytes=5)
    plan = plan_of(layers, (2, 1, 1), schedule=schedule, microbatches=microbatches)
    measured = noted(plan, 300, part)
    simulated = simulate_recorded(plan, measured)
    apart = timing_error(simulated, measured)
    assert apart.events == len(part) * microbatches * 3 * 2
    assert apart.worst_share < 1e-6
    rounds = {
        (e.rank, e.kind, e.minibatch)
        for e in measured.events.rows()
        if e.kind in ("update", "all_reduce")
    }
    assert {
        (e.rank, e.kind, e.minibatch)
        for e in simulated.events.rows()
        if e.kind in ("update", "all_reduce")
    } == rounds
    assert summarize(simulated).minibatches == len(part)
    assert simulated.memory[0].time_s[0] == 0


def test_little_is_simulated_of_a_long_run() -> None:
    plan = plan_of(equal_layers(2), (1, 1))
    measured = noted(plan, 100, range(60, 70)).model_copy(update={"minibatches": 10**9})
    rows = [e._replace(minibatch=e.minibatch + 10**6) for e in measured.events.rows()]
    late = measured.model_copy(update={"events": Events.of(rows)})
    simulated = simulate_recorded(plan, late)
    assert {e.minibatch for e in simulated.events.rows() if e.kind == "forward"} == set(
        range(10**6 + 60, 10**6 + 70)
    )
    assert default_minibatches(plan) < 100
    assert timing_error(simulated, late).worst_share < 1e-6


def test_a_run_of_nothing_is_refused() -> None:
    plan = plan_of(equal_layers(1), (1,))
    with pytest.raises(InputError, match="no computations"):
        simulate_recorded(plan, simulate(plan, 1).model_copy(update={"events": Events.of(())}))
