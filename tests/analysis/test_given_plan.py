"""A plan that was made before, in the terms of the cost model."""

from __future__ import annotations

import pytest

from planner.analysis.given_plan import GivenPlan, priced_plan
from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.formats.cluster import hierarchical_cluster
from planner.options.solving import SolveOptions
from planner.solver.evaluate.evaluation import evaluate
from tests.samples import layer, profile
from tests.solver.search.levels.test_columns import in_all_orders

SERVERS = hierarchical_cluster((2, 2), (64.0, 1.0))
MODEL = profile(*(layer(name, 1, 2, output_bytes=4, weight_bytes=2) for name in "abcd"))


def test_the_ranks_of_a_plan_are_kept() -> None:
    """Two replicas of each of two stages: server by server, and stage by stage."""
    options, stages = SolveOptions(), tuple(candidates([range(2), range(2, 4)], [2, 2]))
    prices = []
    for order in in_all_orders(stages):
        plan = priced_plan(options, LayerCosts(MODEL), SERVERS, order)
        given = GivenPlan.of(MODEL, plan)
        assert evaluate(given.problem, given.stages).seconds == pytest.approx(plan.predicted.seconds_per_minibatch)
        prices.append((plan.stages[0].ranks, plan.predicted.seconds_per_minibatch))
    assert [ranks for ranks, _ in prices] == [(0, 1), (0, 2)]
    assert prices[0][1] != pytest.approx(prices[1][1])
