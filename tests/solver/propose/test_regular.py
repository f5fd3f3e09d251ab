"""Whatever the time limit, the answer is no slower than plans that take no search, and says only
what is proven.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.by_hand import equal_blocks
from planner.solver.evaluate.evaluation import priced
from planner.solver.pool import Pool
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.propose.regular import regular_plans
from planner.solver.tuning.record import STANDARD
from tests.plan.test_blocks import transformer

MODEL = transformer(8, "h.{block}.part{part}")
FLAT, SERVERS = flat_cluster(16, 1e3), hierarchical_cluster([4, 4], [1e4, 1e3])


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "1f1b-flush", "gpipe"])
@pytest.mark.parametrize("cluster", [FLAT, SERVERS])
@pytest.mark.parametrize("time_limit_s", [1e-9, 0.2])
def test_no_slower_than_baselines(schedule: str, cluster: Cluster, time_limit_s: float) -> None:
    microbatches = 32 if find(schedule).divides else 1
    plan = solve(
        MODEL, cluster, schedule=schedule, microbatches=microbatches, time_limit_s=time_limit_s
    )
    problem = Problem(LayerCosts(MODEL), Setting(cluster, find(schedule), microbatches))
    for stages in (1, 2, 4, 8):
        cut = equal_blocks(problem.layer_costs, stages)
        for gpus in (16, 8):
            copies = [
                replace(each, options=replace(each.options, replicas=gpus // stages))
                for each in cut
            ]
            seconds = priced(problem, copies).seconds
            # A simulated plan waits; so does the baseline in its own simulation.
            assert (
                plan.predicted.seconds_per_minibatch <= seconds * (1 + 1e-9)
                or plan.predicted.by == "simulation"
            )
            assert plan.solver.cost_model_s is not None
            assert plan.solver.cost_model_s <= seconds / 0.9
    assert plan.solver.lower_bound_s <= plan.predicted.seconds_per_minibatch


def test_nothing_is_proven_without_time() -> None:
    plan = solve(MODEL, FLAT, schedule="1f1b-flush", microbatches=32, time_limit_s=1e-9)
    proven_s = plan.solver.lower_bound_s * (1 + STANDARD.evaluate.timing_share)
    assert plan.solver.status == (
        "optimal" if plan.predicted.seconds_per_minibatch <= proven_s else "feasible"
    )
    assert not plan.solver.exhausted
    proven = solve(MODEL, FLAT, schedule="1f1b-flush", microbatches=32)
    assert plan.solver.lower_bound_s <= proven.predicted.seconds_per_minibatch


def test_without_any_plan_the_command_says_so() -> None:
    # No two stages fit together: only the search finds a plan, if there is one.
    tight = flat_cluster(16, 1e3, memory_bytes=1)
    with pytest.raises(PlannerError, match="before any plan was found"):
        solve(MODEL, tight, schedule="1f1b-flush", microbatches=32, time_limit_s=1e-9)


def test_equal_blocks() -> None:
    costs = LayerCosts(MODEL)
    # with embedding and head
    assert [len(stage.layers) for stage in equal_blocks(costs, 4)] == [9, 8, 8, 9]
    assert [len(stage.layers) for stage in equal_blocks(costs, 3)] == [13, 12, 9]
    assert len(equal_blocks(costs, 16)) == 8  # there are no more blocks


def test_stages_recompute_and_share_the_optimizer_as_memory_demands() -> None:
    heavy = [
        each.model_copy(update={"optimizer_bytes": 200, "saved_bytes": 50}) for each in MODEL.layers
    ]
    model = MODEL.model_copy(update={"layers": tuple(heavy), "optimizer_elementwise": True})
    held = []
    for memory_bytes in (20_000, 11_000, 8_000):
        problem = Problem(
            LayerCosts(model), Setting(flat_cluster(4, 1e3, memory_bytes), find("1f1b-flush"), 8)
        )
        first = Pool(problem, 0.0)
        first.consider_regular(regular_plans(problem))
        assert first.best is not None
        assert first.best.fits(problem.cluster)
        held.append(max(first.best.price.gpu_bytes))
    assert held == sorted(held, reverse=True)
    unlimited = Problem(LayerCosts(model), Setting(flat_cluster(4, 1e3), find("1f1b-flush"), 8))
    assert not any(
        stage.options.recompute for plan in regular_plans(unlimited) for stage in plan.stages
    )


def test_any_plan_that_fits_is_the_answer_where_no_equal_stages_fit() -> None:
    # Under 1f1b the first of equal stages holds most versions of the weights.
    heavy = [
        each.model_copy(update={"weight_bytes": 100, "gradient_bytes": 100})
        for each in MODEL.layers
    ]
    model, setting = (
        MODEL.model_copy(update={"layers": tuple(heavy)}),
        Setting(flat_cluster(16, 1e3), find("1f1b")),
    )
    needed = [
        max(plan.price.gpu_bytes) for plan in regular_plans(Problem(LayerCosts(model), setting))
    ]
    tight = flat_cluster(16, 1e3, memory_bytes=min(needed) // 2)
    assert not list(regular_plans(Problem(LayerCosts(model), replace(setting, cluster=tight))))
    plan = solve(model, tight, schedule="1f1b", time_limit_s=1e-9)
    assert all(
        plan.memory_bytes(stage) <= (tight.memory_bytes or 0) for stage in range(len(plan.stages))
    )


def test_plans_have_one_order_whether_they_were_simulated_or_not() -> None:
    """When both were compared by the cost model where one was not simulated, these three went round
    in a circle.
    """
    problem = Problem(LayerCosts(MODEL), Setting(FLAT, find("1f1b-flush"), 32))
    plan = priced(problem, equal_blocks(problem.layer_costs, 4))

    def made(formula_s: float, simulated_s: float | None) -> Evaluation:
        price = replace(plan.price, seconds_per_minibatch=formula_s)
        return replace(plan, price=price if simulated_s is None else price.simulated(simulated_s))

    waits, quick, unsimulated = made(8.0, 10.0), made(8.5, 9.0), made(8.2, None)
    for slow, fast in ((waits, quick), (quick, unsimulated), (waits, unsimulated)):
        assert problem.is_faster(fast, slow)
        assert not problem.is_faster(slow, fast)
    assert not problem.is_faster(made(8.9, None), quick)  # it may wait as others do
    assert problem.is_faster(made(8.0, None), made(8.5, None), share=0.05)
    assert not problem.is_faster(made(8.0, None), made(8.5, None), share=0.06)
