"""A simulation that would not end is refused, or ends with its time limit, and what the hints say
works.
"""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.formats.plan import Plan
from planner.simulator.simulate_plan import (
    MOST_UNITS,
    check_runs_to_end,
    default_minibatches,
    simulate,
)
from tests.simulator.plans import equal_layers, plan_of


def _with(plan: Plan, microbatches: int) -> Plan:
    return plan.model_copy(update={"microbatches": microbatches})


@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe", "zb-h1", "2bw"])
def test_millions_of_microbatches_are_refused_and_still_checked(schedule: str) -> None:
    plan = plan_of(equal_layers(2), (1, 1), schedule=schedule, microbatches=8)
    huge = _with(plan, 2_000_000)
    with pytest.raises(
        InputError, match=r"1 minibatch of 2,000,000 microbatches at 2 stages: 4,000,000 units"
    ) as told:
        simulate(huge)
    assert f"`microbatches={MOST_UNITS // 2}`" in told.value.hint
    assert default_minibatches(_with(plan, MOST_UNITS // 2)) == 1
    check_runs_to_end(huge)


def test_a_hint_names_how_many_minibatches_are_simulated() -> None:
    plan = plan_of(equal_layers(2), (1, 1), schedule="gpipe", microbatches=MOST_UNITS // 4)
    with pytest.raises(InputError) as told:
        simulate(plan, 10**9)
    assert told.value.hint == "give `minibatches=2` or fewer"


def test_a_time_limit_ends_a_simulation() -> None:
    plan = plan_of(equal_layers(2), (1, 1), schedule="1f1b-flush", microbatches=64)
    with pytest.raises(InputError, match="took longer than `time_limit_s=0`") as told:
        simulate(plan, 1000, time_limit_s=0.0)
    assert "fewer minibatches" in told.value.hint
    assert simulate(plan, 1, time_limit_s=100.0).minibatches == 1
