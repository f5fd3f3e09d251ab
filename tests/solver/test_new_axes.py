"""Search == every plan, with sharded optimizer state, recomputed units, and limits on stages and
staleness.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.layer_costs import LayerCosts
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import flat_cluster, hierarchical_cluster
from planner.formats.names import CODECS
from planner.formats.profile import Profile
from planner.options.solving import StageRules
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import stages_along
from planner.solver.problem.states import Chain
from planner.solver.search.levels.flat import nearest_search
from planner.solver.search.levels.levels import search_levels
from planner.solver.search.pipeline_search import PipelineSearch
from tests.samples import layer, profile
from tests.solver.brute import brute_force
from tests.solver.every_plan import EveryPlan

SCHEDULES = ("1f1b", "1f1b-flush", "gpipe", "2bw")


def random_model(rng: np.random.Generator) -> Profile:
    """Blocks of one or two layers, of few kinds, so that units are equal and ties are common."""
    count = int(rng.integers(2, 8))
    kinds = [
        {
            "forward_s": float(rng.integers(1, 6)),
            "backward_s": float(rng.integers(1, 9)),
            "update_s": float(rng.integers(0, 4)),
            "weight_bytes": int(rng.integers(0, 9)),
            "saved_bytes": int(rng.integers(1, 12)),
        }
        for _ in range(int(rng.integers(1, 4)))
    ]
    size = int(rng.integers(1, 3))
    layers = []
    for number in range(count):
        kind = kinds[int(rng.integers(len(kinds)))]
        state_bytes = kind["weight_bytes"] * int(rng.integers(0, 4))
        made = layer(
            f"blocks.{number // size}.{number % size}", output_bytes=int(rng.integers(1, 6))
        )
        layers.append(
            made.model_copy(
                update=kind
                | {"gradient_bytes": kind["weight_bytes"], "optimizer_bytes": state_bytes}
            )
        )
    works = rng.random() < 0.5
    # stages of trainable models keep the order, and their peak is that of the layer at work
    if works:
        layers = [
            each.model_copy(update={"workspace_bytes": int(rng.integers(1, 6))}) for each in layers
        ]
    return profile(*layers).model_copy(
        update={"graph_hash": "0123" if works else None, "optimizer_elementwise": True}
    )


def random_problem(rng: np.random.Generator) -> Problem:
    schedule = find(SCHEDULES[int(rng.integers(len(SCHEDULES)))])
    model, gpus = random_model(rng), int(rng.integers(2, 7))
    microbatches = int(rng.integers(1, 9)) if schedule.divides else 1
    names = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes")
    everything = sum(getattr(each, name) for each in model.layers for name in names)
    memory = None if rng.random() < 0.1 else 1 + int(everything * rng.uniform(0.15, 1.2))
    cluster = flat_cluster(
        gpus, float(rng.choice([0.5, 2.0, 8.0, 1e4])), memory, float(rng.choice([0.0, 0.0, 0.25]))
    )
    rules = StageRules(
        recompute=("auto", "auto", "auto", "never", "always", "blocks")[int(rng.integers(6))],
        shard_optimizer=("auto", "auto", "never", "always")[int(rng.integers(4))],
        max_stages=None if rng.random() < 0.7 else int(rng.integers(1, 5)),
        max_staleness=None if rng.random() < 0.7 else int(rng.integers(schedule.staleness(1), 4)),
    )
    codec = CODECS["bfloat16" if gpus % 3 == 0 else "none"]
    return Problem(LayerCosts(model, codec=codec), Setting(cluster, schedule, microbatches), rules)


def check(seed: int) -> tuple[bool, bool, bool]:
    """Compare one instance; return whether there is a plan, and whether it is sharded and
    recomputes units.
    """
    problem = random_problem(np.random.default_rng([16, seed]))
    search = PipelineSearch(problem, Chain(problem.layer_costs))
    path, expected = search.best(), EveryPlan(problem).best()
    assert (path is None) == (expected is None), seed
    if path is None or expected is None:
        return False, False, False
    stages = stages_along(search.space, path)
    assert path.seconds == pytest.approx(expected[0], rel=1e-9), seed
    for plan in (stages, expected[1]):  # the price of the whole plan is that of its stages
        priced = price(problem.layer_costs, plan, problem.setting)
        assert priced.seconds_per_minibatch == pytest.approx(expected[0], rel=1e-9), seed
        assert (
            problem.cluster.memory_bytes is None
            or max(priced.gpu_bytes) <= problem.cluster.memory_bytes
        ), seed
    groups = [stage.options.recompute for stage in stages]
    return True, any(each.options.shards_optimizer for each in stages), any(groups)


def test_search_finds_what_every_plan_says() -> None:
    found = np.sum([check(seed) for seed in range(60)], axis=0)
    assert np.all(found > 5)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_search_finds_what_every_plan_says_on_a_thousand_models(part: int) -> None:
    found = np.sum([check(seed) for seed in range(100 * part, 100 * part + 100)], axis=0)
    assert np.all(found > 10)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "1f1b-flush"])
def test_on_levels_the_answer_is_in_its_bounds_and_mostly_the_best(schedule: str) -> None:
    plans = sharded = best = 0
    for seed in range(12):
        rng = np.random.default_rng([7, seed])
        model = random_model(rng)
        model = model.model_copy(update={"layers": model.layers[:3], "edges": model.edges[:2]})
        names = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes")
        memory = 1 + int(
            sum(getattr(each, name) for each in model.layers for name in names)
            * rng.uniform(0.3, 1.2)
        )
        cluster = hierarchical_cluster(
            (2, 2), (4.0, float(rng.choice([0.5, 2.0]))), memory_bytes=memory
        )
        microbatches = int(rng.integers(1, 5)) if find(schedule).divides else 1
        problem = Problem(LayerCosts(model), Setting(cluster, find(schedule), microbatches))
        space, expected = Chain(problem.layer_costs), brute_force(problem)
        nearest = nearest_search(problem, space, problem.limits).best()
        if expected is None or nearest is None:
            assert expected is None
            continue
        found = search_levels(problem, space, nearest)
        assert found.path is not None
        assert found.bound_s <= expected.seconds * (1 + 1e-9)
        assert found.path.seconds >= expected.seconds * (1 - 1e-9)
        plans, sharded = (
            plans + 1,
            sharded + any(each.shards_optimizer for each in found.path.options),
        )
        best += found.path.seconds <= expected.seconds * (1 + 1e-9)
    assert sharded > 1
    assert best >= 0.8 * plans > 3


def deep() -> Profile:
    layers = [layer(f"{n}", 1, 2, output_bytes=1, weight_bytes=10**9) for n in range(6)]
    return profile(*layers).model_copy(update={"optimizer_elementwise": True})


def test_limits_on_stages_and_staleness_are_kept() -> None:
    cluster = flat_cluster(6, 1e8)
    assert len(solve(deep(), cluster).stages) == 6
    assert len(solve(deep(), cluster, max_stages=3).stages) <= 3
    fresh = solve(deep(), cluster, max_staleness=2)
    assert 0 < fresh.staleness <= 2
    assert solve(deep(), cluster, max_staleness=0).staleness == 0
    with pytest.raises(InputError, match="`max_staleness=0` is less than the 1 update"):
        solve(deep(), cluster, schedule="2bw", microbatches=6, max_staleness=0)
    with pytest.raises(InputError, match="`max_stages=0` is too small"):
        solve(deep(), cluster, max_stages=0)


def test_sharding_that_would_do_is_named() -> None:
    """Two replicas of one layer hold half of 400 bytes each, beside 100 of weights and 100 of
    gradients.
    """
    heavy = layer("a", weight_bytes=100).model_copy(update={"optimizer_bytes": 400})
    model = profile(heavy).model_copy(update={"optimizer_elementwise": True})
    with pytest.raises(InfeasibleError) as caught:
        solve(model, flat_cluster(2, 1e9, 450), shard_optimizer="never")
    assert "so would `shard_optimizer=auto`" in caught.value.hint
    plan = solve(model, flat_cluster(2, 1e9, 450))
    assert [stage.sharded for stage in plan.stages] == [True]
