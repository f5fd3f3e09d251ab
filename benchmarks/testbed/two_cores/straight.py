"""Find the best plan with one worker per stage, to measure a pipeline on two cores.

`plan solve` also considers replicas. For models with few weights its answer is one stage with two
replicas.
"""

from __future__ import annotations

import time

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.plan_parts import SolverReport
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.evaluate.evaluation import priced, simulated
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import uncut_groups


def straight_plan(profile: Profile, cluster: Cluster, schedule: str, microbatches: int) -> Plan:
    """Return the fastest of all cuts of `profile` into two stages under the cost model, by trying
    each.
    """
    began = time.perf_counter()
    layer_costs = LayerCosts(profile)
    groups = uncut_groups(layer_costs)
    problem = Problem(
        layer_costs, Setting(cluster, find(schedule), microbatches), budget=Budget.unlimited()
    )
    every = []
    for cut in range(1, len(groups)):
        halves = [
            [layer for group in part for layer in group] for part in (groups[:cut], groups[cut:])
        ]
        every.append(priced(problem, candidates(halves, (1, 1))))
    best = simulated(problem, min(every, key=lambda candidate: candidate.seconds))
    report = SolverReport(
        name="every cut into two stages",
        status="optimal",
        lower_bound_s=best.seconds,
        gap=0.0,
        seconds=time.perf_counter() - began,
    )
    return assemble(problem, best, report)
