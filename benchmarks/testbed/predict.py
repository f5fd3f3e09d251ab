"""Predict a plan with given stages, and data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.cost.tensor import layer_costs_on
from planner.formats.cluster import Cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.options.solving import DepthRule
from planner.schedule.registry import find
from planner.simulator.simulate_plan import simulated_s
from planner.solver.assemble import GIVEN, assemble
from planner.solver.by_hand import equal_time
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem

__all__ = ["balanced_stages", "given_plan", "in_proportion", "simulated_s"]


def given_plan(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[int],
    replicas: Sequence[int],
    schedule: str = "1f1b",
    microbatches: int = 1,
    depth: DepthRule = "auto",
) -> Plan:
    """Return a priced plan with the given layers and replicas per stage."""
    layer_costs = layer_costs_on(profile, cluster)
    ends = [0, *accumulate(stages)]
    assert ends[-1] == len(profile.layers)
    chosen = candidates([range(first, end) for first, end in pairwise(ends)], replicas)
    setting = Setting(cluster, find(schedule), microbatches)
    problem = Problem(layer_costs, setting, depth=depth, budget=Budget.unlimited())
    best = evaluate(problem, chosen)
    report = GIVEN.model_copy(update={"cost_model_s": problem.price(chosen).seconds_per_minibatch})
    return assemble(problem, best, report)


def balanced_stages(profile: Profile, count: int) -> list[int]:
    """Return the layers of each of `count` stages of about equal computing time."""
    return [len(stage.layers) for stage in equal_time(LayerCosts(profile), count)]


def in_proportion(count: int, parts: Sequence[float]) -> list[int]:
    """Return integers in about this proportion whose sum is `count`: (10, (1, 1, 1)) -> [3,
    4, 3].
    """
    ends = [round(count * end / sum(parts)) for end in accumulate(parts)]
    return [end - start for start, end in pairwise([0, *ends])]
