"""The orders in which a plan's workers may take a cluster's ranks: stage by stage, or pipeline by pipeline.

Stage by stage, the replicas of a stage are neighbours: its gradients cross few slow links, and its activations may
cross many. Pipeline by pipeline, what exchanges activations is together, and gradients cross the slow links. Between
the two lies every number of columns (`planner.cost.network.topology.column_ranks`) that divides the replicas of all
stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from planner.cost.candidate import Candidate
from planner.cost.network.placement import places_matter
from planner.cost.network.topology import column_ranks
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import RESOLUTION, Evaluation


def in_every_order(problem: Problem, plans: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the plans, each in the orders of its workers that differ in price, by increasing price.

    Of equal prices, stage by stage comes first, then fewer columns. Only clusters of several levels tell orders apart,
    and the published cost models know no places.
    """
    found = list(plans)
    if places_matter(problem.cluster) and problem.simulates:
        found = [order for plan in found for order in _orders(problem, plan)]
    return sorted(found, key=lambda plan: plan.seconds)


def _orders(problem: Problem, plan: Evaluation) -> list[Evaluation]:
    """Return the plan as it is, then in as many columns as give another price."""
    orders = [plan]
    for columns in columns_of(problem, plan):
        candidate = in_columns(plan, columns)
        order = Evaluation(candidate, problem.price(candidate))
        if all(abs(order.seconds - other.seconds) > RESOLUTION * other.seconds for other in orders):
            orders.append(order)
    return orders


def columns_of(problem: Problem, plan: Evaluation) -> list[int]:
    """Return the numbers of columns, two or more, in which the plan's workers may stand; none if all are near."""
    nearest = problem.cluster.joined[0].size
    replicas, given = _replicas(plan), any(stage.ranks for stage in plan.stages)
    if given or len(replicas) == 1 or sum(replicas) <= nearest:
        return []
    common = math.gcd(*replicas)
    return [columns for columns in range(2, common + 1) if common % columns == 0]


def in_columns(plan: Evaluation, columns: int) -> tuple[Candidate, ...]:
    """Return the plan's stages on the ranks of so many columns."""
    ranks = column_ranks(_replicas(plan), columns)
    workers = zip(plan.price.workers, plan.stages, strict=True)
    return tuple(replace(stage, ranks=tuple(ranks[worker])) for worker, stage in workers)


def _replicas(plan: Evaluation) -> list[int]:
    """Return the replicas of the pipeline's workers, in its order; a worker may have several stages."""
    replicas = {worker: stage.replicas for worker, stage in zip(plan.price.workers, plan.stages, strict=True)}
    return [replicas[worker] for worker in sorted(replicas)]
