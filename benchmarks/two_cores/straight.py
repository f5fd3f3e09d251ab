"""Find the best plan with one worker per stage, to measure a pipeline on two cores.

`plan solve` also considers replicas. For models with few weights its answer is one stage with two replicas.
"""

from __future__ import annotations

import time

from planner.cost.layer_costs import Candidate, LayerCosts, candidates
from planner.cost.price import Price
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan, SolverReport
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.candidates.trials import simulated_price
from planner.solver.chain.states import uncut_groups


def straight_plan(profile: Profile, cluster: Cluster, schedule: str, microbatches: int) -> Plan:
    """Return the fastest of all cuts of `profile` into two stages under the default cost model, by trying each."""
    began = time.perf_counter()
    layer_costs = LayerCosts(profile)
    groups = uncut_groups(layer_costs)
    priced: list[tuple[list[Candidate], Price]] = []
    for cut in range(1, len(groups)):
        halves = [[layer for group in part for layer in group] for part in (groups[:cut], groups[cut:])]
        stages = candidates(halves, (1, 1))
        priced.append((stages, price(layer_costs, stages, Setting(cluster, find(schedule), microbatches))))
    stages, cost = min(priced, key=lambda pair: pair[1].seconds_per_minibatch)
    cost = simulated_price(layer_costs, stages, cluster, cost, "auto", find(schedule), microbatches)
    seconds = cost.seconds_per_minibatch
    report = SolverReport(
        name="every cut into two stages",
        cost_model="resource",
        status="optimal",
        lower_bound_s=seconds,
        gap=0.0,
        seconds=time.perf_counter() - began,
    )
    return assemble(layer_costs, cluster, stages, cost, find(schedule), microbatches, report)
