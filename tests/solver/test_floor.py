"""Under any time limit the answer is no slower than what people use without a planner, on as many
GPUs or fewer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.cost.kinds import everything_on
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import PlannerError
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster, hierarchical_cluster
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.simulator.simulate_plan import simulated_s
from planner.solver import search_plan as solve
from planner.solver.by_hand import equal_blocks
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from tests.plan.test_blocks import transformer

LIMITS_S = (1e-9, 1e-3, 2e-2)
SCHEDULES = ("1f1b", "2bw", "1f1b-flush", "gpipe", "zb-h1")


def random_model(rng: random.Random) -> Profile:
    """A small or medium model of blocks whose layers are uneven."""
    model = transformer(rng.choice((2, 5, 8, 12)), "h.{block}.part{part}")
    factors = [rng.uniform(0.3, 3) for _ in range(4)]
    layers = [
        layer.model_copy(
            update={
                "forward_s": layer.forward_s * factors[number % 4],
                "backward_s": layer.backward_s * factors[number % 4],
                "weight_bytes": 100 + layer.weight_bytes,
                "gradient_bytes": 100,
                "optimizer_bytes": 200,
                "saved_bytes": rng.randint(1, 50),
            }
        )
        for number, layer in enumerate(model.layers)
    ]
    return model.model_copy(update={"layers": tuple(layers), "optimizer_elementwise": True})


def random_cluster(rng: random.Random, model: Profile) -> Cluster:
    """Flat or of two levels, with a memory that may be too small for some of the baselines."""
    whole = sum(
        layer.weight_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in model.layers
    )
    memory_bytes = rng.choice((None, int(whole * rng.uniform(0.4, 3))))
    bandwidth = 10 ** rng.uniform(0.5, 4)
    if rng.random() < 0.3:
        return hierarchical_cluster(
            [rng.choice((2, 4)), 2], [10 * bandwidth, bandwidth], memory_bytes
        )
    if rng.random() < 0.2:
        kinds = (DeviceKind(count=2), DeviceKind(count=rng.choice((2, 6)), speed=3.0))
        return flat_cluster(sum(kind.count for kind in kinds), bandwidth, memory_bytes).model_copy(
            update={"kinds": kinds}
        )
    return flat_cluster(rng.choice((2, 3, 4, 6, 8, 12)), bandwidth, memory_bytes)


def baselines(problem: Problem) -> Iterator[tuple[str, Evaluation]]:
    """Yield those that fit the memory, simulated at the published depths, however long that
    takes.
    """
    cluster, costs = problem.cluster, problem.layer_costs
    parallel = everything_on(costs, cluster, range(cluster.gpus))
    found = {"data parallel": [parallel]}
    if cluster.gpus > 1:
        found["ZeRO-1"] = [replace(parallel, options=replace(parallel.options, level=1))]
    if not cluster.kinds:
        found |= {
            f"data parallel on {n}": [everything_on(costs, cluster, range(n))]
            for n in range(1, cluster.gpus)
        }
    for count in (2, 4, 8):
        cut = equal_blocks(costs, count)
        if cluster.gpus % count == 0 and len(cut) == count:
            replicas = cluster.gpus // count
            found[f"{count} equal stages"] = [
                replace(stage, options=replace(stage.options, replicas=replicas)) for stage in cut
            ]
    for name, stages in found.items():
        plan = evaluate(problem, stages)
        if plan.fits(cluster):
            yield name, plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(24))
def test_no_baseline_that_fits_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    cluster, name = random_cluster(rng, model), SCHEDULES[seed % len(SCHEDULES)]
    microbatches = 2 * cluster.gpus if find(name).divides else 1
    problem = Problem(
        LayerCosts(model), Setting(cluster, find(name), microbatches), depth="published"
    )
    known = list(baselines(problem))
    for limit_s in LIMITS_S:
        try:
            plan = solve(
                model, cluster, schedule=name, microbatches=microbatches, time_limit_s=limit_s
            )
        except PlannerError:
            assert not known
            continue
        seconds = simulated_s(plan)
        assert plan.predicted.seconds_per_minibatch == pytest.approx(seconds)
        assert seconds > 0
        slower = {name: way.seconds for name, way in known if seconds > way.seconds * (1 + 1e-9)}
        assert not slower, f"{plan.config} takes {seconds}"
