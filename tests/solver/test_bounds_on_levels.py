"""No plan is below the bound that an answer states, on clusters whose links differ, under any
schedule.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import hierarchical_cluster
from planner.formats.profile import load_profile
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.problem.problem import Problem
from planner.solver.propose.regular import regular_plans

GNMT = load_profile(Path(__file__).parents[2] / "profiles" / "gnmt8" / "cpu.json")
SERVERS = hierarchical_cluster((4, 2), (1.25e9, 1.25e8), latencies_s=(1e-4, 1e-4))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "zb-h1"])
def test_no_regular_plan_is_below_the_bound(schedule: str) -> None:
    """Under 2bw the search takes all links for the slowest, so its time is no bound: 4-4 was 17%
    below it.
    """
    microbatches = 16 if find(schedule).divides else 1
    plan = solve(GNMT, SERVERS, schedule=schedule, microbatches=microbatches)
    problem = Problem(LayerCosts(GNMT), Setting(SERVERS, find(schedule), microbatches))
    least_s = min(regular.seconds for regular in regular_plans(problem))
    assert plan.solver.lower_bound_s <= least_s * (1 + 1e-9)
    assert plan.solver.cost_model_s is not None
    assert (
        plan.solver.lower_bound_s <= plan.solver.cost_model_s * (1 + 1e-9)
        or plan.solver.status == "optimal"
    )
