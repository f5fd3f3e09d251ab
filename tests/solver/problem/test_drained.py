"""The bound of synchronous plans against every plan: it is never above the fastest, and closer than
perfect balance.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner import solve
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.options.solving import StageRules
from planner.schedule.registry import find
from planner.solver.problem.bounds import balanced_s
from planner.solver.problem.drained import drained_s
from planner.solver.problem.problem import Problem
from planner.solver.propose.regular import regular_plans
from planner.units import SLACK
from tests.samples import layer, profile
from tests.solver.brute import brute_force
from tests.solver.every_plan import EveryPlan
from tests.solver.test_new_axes import random_problem


def check(seed: int) -> tuple[bool, bool]:
    """Compare one instance; return whether a plan fits, and whether the bound is above perfect
    balance.
    """
    problem = random_problem(np.random.default_rng([34, seed]))
    setting, schedule = problem.setting, ("gpipe", "1f1b-flush")[seed % 2]
    microbatches = 1 + seed % 11
    problem = replace(
        problem,
        setting=replace(setting, schedule=find(schedule), microbatches=microbatches, chunks=1),
    )
    problem = replace(problem, rules=replace(problem.rules, max_staleness=None))
    best, bound_s = EveryPlan(problem).best(), drained_s(problem)
    # with single stages that divide gradients and weights, too
    whole = next(regular_plans(problem), None)
    fastest_s = min([best[0]] if best is not None else [], default=np.inf)
    fastest_s = min(fastest_s, np.inf if whole is None else whole.seconds)
    assert bound_s <= fastest_s * (1 + SLACK), seed
    return bool(np.isfinite(fastest_s)), bound_s > balanced_s(
        problem.layer_costs, problem.setting
    ) * (1 + SLACK)


def test_bound_is_never_above_the_fastest_plan() -> None:
    fits, above = np.sum([check(seed) for seed in range(150)], axis=0)
    assert fits > 75
    assert above > 50


@pytest.mark.slow
def test_bound_is_never_above_the_fastest_of_many_plans() -> None:
    assert np.sum([check(seed) for seed in range(150, 2000)], axis=0)[0] > 500


@pytest.mark.parametrize("seed", range(20))
def test_bound_holds_on_servers(seed: int) -> None:
    problem = random_problem(np.random.default_rng([35, seed]))
    servers = hierarchical_cluster([2, 2], [8.0, float(1 + seed % 3)], problem.cluster.memory_bytes)
    setting = Setting(servers, find("1f1b-flush"), 2 + seed % 6)
    problem = replace(
        problem, setting=setting, rules=replace(problem.rules, max_stages=None, max_staleness=None)
    )
    if len(problem.layer_costs.profile.layers) > 6:
        pytest.skip("there are too many plans to try")
    best = brute_force(problem)
    assert best is None or drained_s(problem) <= best.seconds * (1 + SLACK)


def even_problem(
    cluster: Cluster, microbatches: int, rules: StageRules, saved_bytes: int = 6
) -> Problem:
    """Return eight layers of 1 s each way, of 10 B of weights and gradients each."""
    sizes = {"weight_bytes": 10, "gradient_bytes": 10, "saved_bytes": saved_bytes}
    layers = [
        layer(f"blocks.{n}.0", forward_s=1.0, backward_s=1.0, output_bytes=1).model_copy(
            update=sizes
        )
        for n in range(8)
    ]
    return Problem(
        LayerCosts(profile(*layers)), Setting(cluster, find("1f1b-flush"), microbatches), rules
    )


def test_bound_of_equal_stages_is_the_published_bubble() -> None:
    """Where only two layers fit, four GPUs need four stages, whose bubble is 3 of 8
    microbatches.
    """
    problem = even_problem(
        flat_cluster(4, 1e12, 40), 8, StageRules(recompute="never"), saved_bytes=0
    )
    assert drained_s(problem) == pytest.approx((8 + 3) * 4.0, rel=1e-6)


def test_bound_knows_what_memory_makes_recompute() -> None:
    """One GPU lacks 24 of the 48 B that are saved: a block gains 6 B, and one less where a value of
    1 B enters it.
    """
    problem = even_problem(flat_cluster(1, 1e12, 160 + 24), 4, StageRules())
    assert drained_s(problem) == pytest.approx(4 * (16.0 + 1.0 + 18 / 5))
    never = even_problem(flat_cluster(1, 1e12, 160 + 24), 4, StageRules(recompute="never"))
    assert drained_s(never) == np.inf


def test_bound_knows_the_messages_of_the_fewest_stages() -> None:
    free, slow = (even_problem(flat_cluster(4, each, 60), 8, StageRules()) for each in (1e12, 0.5))
    assert drained_s(slow) - drained_s(free) == pytest.approx(2 * 2 / 0.5)


def test_a_search_stays_exact_beside_stages_that_it_does_not_know() -> None:
    """One GPU holds one of three microbatches, so the stage recomputes; no replicas divide
    anything.
    """
    model = profile(layer("only", 1, 0, saved_bytes=1)).model_copy(
        update={"optimizer_elementwise": True}
    )
    plan = solve(model, flat_cluster(1, 1.0, 1), schedule="gpipe", microbatches=3)
    assert plan.solver.lower_bound_s == plan.predicted.seconds_per_minibatch == 6.0
