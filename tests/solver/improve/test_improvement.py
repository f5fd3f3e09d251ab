"""Local search on simulated times leads from any plan to one that no single change makes faster."""

from __future__ import annotations

import pytest

from planner.cost.candidate import candidates
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.options.solving import StageRules
from planner.schedule.registry import find
from planner.simulator.simulate_plan import simulated_s
from planner.solver.assemble import assemble
from planner.solver.by_hand import equal_blocks
from planner.solver.evaluate.evaluation import evaluate, priced, simulated
from planner.solver.improve.improvement import deepen, improve
from planner.solver.pool import Pool
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from tests.samples import layer, profile
from tests.solver.brute import plans

LAYERS = [
    layer(f"h{n}", 1.0, 2.0, output_bytes=10, weight_bytes=100, saved_bytes=10) for n in range(8)
]


def problem(schedule: str, microbatches: int, memory_bytes: int | None = None) -> Problem:
    setting = Setting(flat_cluster(2, 1e6, memory_bytes), find(schedule), microbatches)
    return Problem(LayerCosts(profile(*LAYERS)), setting)


def improved(asked: Problem, start: Evaluation, bound_s: float = 0.0) -> Evaluation:
    """Return what a plan becomes."""
    pool = Pool(asked, bound_s)
    pool.keep(start)
    improve(pool)
    assert pool.best is not None
    return pool.best


def deepened(asked: Problem, start: Evaluation) -> Evaluation:
    """Return what a plan becomes that only grows deeper."""
    pool = Pool(asked, 0.0)
    pool.keep(start)
    deepen(pool, asked)
    assert pool.best is not None
    return pool.best


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("1f1b-flush", 8)])
def test_an_uneven_plan_becomes_even(schedule: str, microbatches: int) -> None:
    asked = problem(schedule, microbatches)
    uneven = evaluate(asked, candidates([range(6), range(6, 8)], [1, 1]))
    even = evaluate(asked, candidates([range(4), range(4, 8)], [1, 1]))
    better = improved(asked, uneven)
    assert better.seconds <= even.seconds * (1 + 1e-9)
    assert better.simulated


def test_nothing_is_tried_at_the_bound_or_without_a_budget() -> None:
    asked = problem("1f1b", 1)
    uneven = evaluate(asked, candidates([range(6), range(6, 8)], [1, 1]))
    assert improved(asked, uneven, uneven.seconds) is uneven
    asked.budget.left = 0
    assert improved(asked, uneven) is uneven


def test_what_does_not_fit_is_no_improvement() -> None:
    limit = max(
        priced(problem("1f1b", 1), candidates([range(6), range(6, 8)], [1, 1])).price.gpu_bytes
    )
    asked = problem("1f1b", 1, limit)
    start = evaluate(asked, candidates([range(6), range(6, 8)], [1, 1]))
    better = improved(asked, start)
    assert better.fits(asked.cluster)
    assert better.seconds < start.seconds


def test_the_time_of_a_simulation_that_the_budget_ended_does_not_count() -> None:
    asked = problem("1f1b-flush", 8)
    uneven = evaluate(asked, candidates([range(6), range(6, 8)], [1, 1]))
    asked = Problem(asked.layer_costs, asked.setting, budget=Budget(most=1))
    assert improved(asked, uneven) is uneven


def test_replicas_that_2bw_has_no_microbatches_for_are_not_allowed() -> None:
    """A change may lead to such plans, and no worker could run them."""
    asked = Problem(LayerCosts(profile(*LAYERS)), Setting(flat_cluster(4, 1e6), find("2bw"), 2))
    for replicas, allowed in ((2, True), (3, False)):
        stages = candidates([range(4), range(4, 8)], [replicas, 1])
        assert asked.allows(priced(asked, stages)) == allowed


def test_stages_recompute_more_than_they_must_where_that_makes_the_pipeline_deeper() -> None:
    """The first stage has room for two minibatches, or for three if it recomputes: the best of all
    plans, simulated.
    """
    layers = [
        layer(f"h{n}", 2.0, 4.0, output_bytes=60, weight_bytes=100, saved_bytes=100)
        for n in range(4)
    ]
    setting = Setting(flat_cluster(2, 10.0, 1250), find("1f1b"))
    asked = Problem(LayerCosts(profile(*layers)), setting, StageRules(shard_optimizer="never"))
    plain = evaluate(asked, candidates([range(2), range(2, 4)], [1, 1]))
    best = improved(asked, plain)
    assert (plain.price.in_flight, best.price.in_flight) == ((2, 1), (3, 1))
    every = (evaluate(asked, stages) for stages in plans(asked, 2))
    fastest_s = min(plan.seconds for plan in every if asked.allows(plan))
    assert best.seconds == pytest.approx(fastest_s)
    assert best.seconds == pytest.approx(16 / 18 * plain.seconds)


def test_cuts_move_with_replicas() -> None:
    """No change of replicas or of a cut alone leads from 2-2-1 to 3-1-1, which is faster."""
    forward_s = (8, 12, 15, 6, 19, 15, 9, 5, 17, 11, 6, 5)
    sizes = (30, 38, 36, 30, 15, 16, 20, 16, 23, 13, 7, 0)
    weights = (0, 0, 47, 28, 8, 0, 0, 46, 0, 0, 12, 50)
    layers = [
        layer(f"l{n}", one, 2.0 * one, output_bytes=size, weight_bytes=weight, saved_bytes=size)
        for n, (one, size, weight) in enumerate(zip(forward_s, sizes, weights, strict=True))
    ]
    asked = Problem(
        LayerCosts(profile(*layers)), Setting(flat_cluster(5, 1.22, latency_s=0.1), find("1f1b"))
    )
    start, better = (
        evaluate(asked, candidates([range(first), range(first, last), range(last, 12)], replicas))
        for first, last, replicas in ((5, 10, [2, 2, 1]), (6, 9, [3, 1, 1]))
    )
    assert better.seconds < 0.95 * start.seconds
    assert improved(asked, start).seconds <= better.seconds * (1 + 1e-9)


def test_long_pipelines_recompute_to_run_deeper_where_they_wait_for_messages() -> None:
    """Ten stages of one layer, whose messages take two thirds of what they compute, and which fit
    as they are.
    """
    layers = [layer(f"h.{n}", output_bytes=1, saved_bytes=10) for n in range(10)]
    costs, cluster = LayerCosts(profile(*layers)), flat_cluster(10, 1.0, 130)
    problem = Problem(costs, Setting(cluster, find("1f1b-flush"), 40))
    plain = simulated(problem, priced(problem, equal_blocks(costs, 10)))
    assert problem.allows(plain)
    best = deepened(problem, plain)
    assert best.seconds < plain.seconds * 0.85
    assert problem.allows(best)
    assert best.price.in_flight[0] > 10
    assert any(stage.options.recompute for stage in best.stages)
    assert best.seconds == pytest.approx(simulated_s(assemble(problem, best)))
    # Where nothing waits, or memory is no limit, there is nothing to do.
    quick = Problem(costs, Setting(flat_cluster(10, 1e9, 130), find("1f1b-flush"), 40))
    settled = simulated(quick, priced(quick, equal_blocks(costs, 10)))
    assert deepened(quick, settled) is settled
