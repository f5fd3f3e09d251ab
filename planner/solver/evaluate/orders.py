"""The orders in which a plan's workers may take the ranks of a cluster with several levels.

A pipeline whose replicas have a common divisor may stand in any number of columns that divides it:
from stage by stage (one column) to pipeline by pipeline
(`planner.cost.network.topology.column_ranks`).
"""

import math
from collections.abc import Iterable

from planner.cost.candidate import Candidate
from planner.cost.network.topology import column_ranks, places_matter
from planner.formats.files import replace
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, Evaluation


def in_every_order(problem: Problem, plans: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the plans, each in the orders of workers that differ in price, cheapest first.

    Only clusters of several levels tell orders apart.
    """
    orders = list(plans)
    if places_matter(problem.cluster):
        orders = [order for plan in orders for order in _orders_of(problem, plan)]
    return sorted(orders, key=lambda plan: plan.seconds)


def _orders_of(problem: Problem, plan: Evaluation) -> list[Evaluation]:
    """Return the plan, and it in each number of columns whose price differs from all before."""
    orders = [plan]
    for columns in columns_of(problem, plan):
        stages = in_columns(plan, columns)
        order = Evaluation(stages, problem.price(stages))
        if all(_differ(order, other) for other in orders):
            orders.append(order)

    return orders


def _differ(order: Evaluation, other: Evaluation) -> bool:
    return abs(order.seconds - other.seconds) > RESOLUTION * other.seconds


def columns_of(problem: Problem, plan: Evaluation) -> list[int]:
    """Return the numbers of columns, two or more, in which the plan's workers may stand.

    There are none if the workers' ranks are fixed, or if all of them are in one group of the first
    level.
    """
    replicas = _replicas(plan)
    nearest = problem.cluster.joined[0].size
    if len(replicas) == 1 or sum(replicas) <= nearest:
        return []
    if any(stage.ranks for stage in plan.stages):
        return []

    common = math.gcd(*replicas)
    return [columns for columns in range(2, common + 1) if common % columns == 0]


def in_columns(plan: Evaluation, columns: int) -> tuple[Candidate, ...]:
    """Return the plan's stages on the ranks of so many columns."""
    ranks = column_ranks(_replicas(plan), columns)
    return tuple(
        replace(stage, ranks=tuple(ranks[worker]))
        for worker, stage in zip(plan.price.workers, plan.stages, strict=True)
    )


def _replicas(plan: Evaluation) -> list[int]:
    """Return the replicas of each worker of the pipeline, which may have several stages."""
    stages = dict(zip(plan.price.workers, plan.stages, strict=True))
    return [stages[worker].replicas for worker in sorted(stages)]
