"""Brute force, for tests that name the parts of a problem."""

from __future__ import annotations

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster
from planner.options.solving import RecomputeRule, ShardRule, StageRules
from planner.schedule.one_stage import ONE_F_ONE_B
from planner.schedule.schedule import Schedule
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from tests.solver import brute


def brute_force(
    layer_costs: LayerCosts,
    cluster: Cluster,
    *,
    schedule: Schedule = ONE_F_ONE_B,
    microbatches: int = 1,
    chunks: int = 1,
    recompute: RecomputeRule = "auto",
    shard: ShardRule = "auto",
    in_order: bool = True,
) -> Evaluation | None:
    """Return the best of all plans in the profile's order, or with any cuts."""
    problem = Problem(
        layer_costs, Setting(cluster, schedule, microbatches, chunks), StageRules(recompute, shard)
    )
    return brute.brute_force(problem, in_order=in_order)
