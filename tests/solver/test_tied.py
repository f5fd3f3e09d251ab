"""Tied weights: the fastest plan whose copies fit and can be trained, against every plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from planner.analysis.given_plan import price
from planner.cost.layer_costs import LayerCosts
from planner.cost.price_with_copies import copies_fit
from planner.cost.setting import Setting
from planner.errors import InfeasibleError, PlannerError
from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.formats.own_plan import OwnPlan, OwnStage
from planner.formats.plan import Plan
from planner.formats.profile import Profile, load_profile
from planner.plan.shared_weights import obstacle, shared_weights, trained_parameters
from planner.schedule.one_stage import FLUSH
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.assemble import assemble
from planner.solver.attempts import attempts
from planner.solver.evaluate.evaluation import evaluate
from planner.solver.pool import Pool
from planner.solver.problem.problem import Problem
from planner.solver.propose.regular import regular_plans
from tests.cost.test_overheads import on_cuda
from tests.cost.test_weight_copies import tied
from tests.samples import layer, profile
from tests.solver.test_degrees import divided

GPUS = 4
# of a layer, by those of its weights
SIZES = {"weight_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 2}


def trains(plan: Plan, model: Profile | None = None) -> bool:
    """Whether the plan's copies stay equal in training, and fit."""
    limit = plan.cluster.memory_bytes
    shared = list(
        shared_weights([stage.layers for stage in plan.stages], trained_parameters(model or tied()))
    )
    fits = limit is None or all(stage.memory.total_bytes <= limit for stage in plan.stages)
    return fits and obstacle(plan, shared) is None


def every_plan(
    cluster: Cluster,
    schedule: str,
    microbatches: int,
    model: Profile | None = None,
    *,
    tensor: int = 1,
) -> Iterator[Plan]:
    """Every plan without sharding and recomputation that can be trained, with all layers divided by
    `tensor` ranks.
    """
    model = model or tied()
    names = [layer.name for layer in model.layers]
    for inner in product((False, True), repeat=len(names) - 1):
        ends = [0, *(at + 1 for at, cut in enumerate(inner) if cut), len(names)]
        for replicas in product(range(1, cluster.gpus + 1), repeat=len(ends) - 1):
            if sum(replicas) * tensor > cluster.gpus:
                continue
            stages = tuple(
                OwnStage(layers=tuple(names[first:end]), replicas=r, tensor=tensor)
                for (first, end), r in zip(pairwise(ends), replicas, strict=True)
            )
            try:
                plan = price(
                    model,
                    cluster,
                    OwnPlan(stages=stages, schedule=find(schedule), microbatches=microbatches),
                )
            except PlannerError:
                continue
            if trains(plan, model):
                yield plan


@pytest.mark.parametrize("memory_bytes", [None, 20 * 10**6, 13 * 10**6])
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("1f1b-flush", 4)])
def test_no_plan_that_can_be_trained_is_faster(
    schedule: str, microbatches: int, memory_bytes: int | None
) -> None:
    cluster = flat_cluster(GPUS, 1e4, memory_bytes)
    least_s = min(
        each.predicted.seconds_per_minibatch for each in every_plan(cluster, schedule, microbatches)
    )
    plan = solve(tied(), cluster, schedule=schedule, microbatches=microbatches)
    assert trains(plan)
    assert plan.predicted.seconds_per_minibatch <= least_s * (1 + 1e-6)
    assert plan.solver.lower_bound_s <= least_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("tensor", "bandwidth", "expected"),
    [
        (1, 300, {"1"}),
        (1, 1e3, {"4", "1-2-1", "1-1-1"}),
        (2, 300, {"1x2"}),
        (2, 1e3, {"2x2", "1x2-1x2"}),
        (2, 1e4, {"2x2"}),
    ],
)
def test_the_messages_and_the_memory_of_copies_are_counted(
    tensor: int, bandwidth: float, expected: set[str]
) -> None:
    """Of a large embedding, of which each rank of a group has a part; where links are slow it is
    better kept whole.
    """
    megabytes, made = {"embedding": 6, "one": 1, "two": 1, "head": 0}, tied()
    layers = [
        layer.model_copy(
            update={
                name: factor * megabytes[layer.name] * 10**6 // 2 for name, factor in SIZES.items()
            }
        )
        for layer in made.layers
    ]
    model, splits = divided(made.model_copy(update={"layers": tuple(layers)}), 2), set()
    for memory_bytes in (None, *range(10**7 // tensor, 3 * 10**7 // tensor, 2 * 10**6 // tensor)):
        cluster = flat_cluster(GPUS, bandwidth, memory_bytes)
        plans = list(every_plan(cluster, "1f1b-flush", 4, model, tensor=tensor))
        if plans:
            plan = solve(model, cluster, schedule="1f1b-flush", microbatches=4, tensor=(tensor,))
            assert trains(plan, model)
            splits.add(plan.config)
            least_s = min(each.predicted.seconds_per_minibatch for each in plans)
            assert plan.predicted.seconds_per_minibatch <= least_s * (1 + 1e-6), memory_bytes
    assert splits == expected


def test_the_least_memory_that_any_plan_needs_is_enough() -> None:
    """What a stage holds at its peak is not the sum of what its layers and its copies hold."""
    rng, apart = np.random.default_rng(0), 0
    for _ in range(12):
        plain = tied()
        layers = [
            each.model_copy(
                update={
                    "saved_bytes": int(rng.integers(1, 40)) * 10**5,
                    "workspace_bytes": int(rng.integers(1, 20)) * 10**5,
                }
            )
            for each in plain.layers
        ]
        model = plain.model_copy(update={"layers": tuple(layers)})
        plans = list(every_plan(flat_cluster(3, 1e4), "1f1b", 1, model))
        leanest = min(
            plans, key=lambda plan: max(stage.memory.total_bytes for stage in plan.stages)
        )
        apart += bool(leanest.shared)
        cluster = flat_cluster(3, 1e4, max(stage.memory.total_bytes for stage in leanest.stages))
        assert trains(solve(model, cluster, recompute="never"), model)
    assert apart, "the leanest of some models has copies"


@pytest.mark.parametrize("memory_bytes", [8 * 10**6, 9 * 10**6])
def test_where_copies_do_not_fit_another_schedule_is_the_answer(memory_bytes: int) -> None:
    cluster = flat_cluster(GPUS, 1e4, memory_bytes)
    with pytest.raises(InfeasibleError) as raised:
        planner.solve(tied(), cluster, schedule="1f1b")
    assert raised.value.hint.startswith("use `schedule=1f1b-flush` `microbatches=16`, under which ")
    plan = planner.solve(tied(), cluster)
    assert plan.schedule is FLUSH
    assert trains(plan)


def test_copies_have_room_beside_communicators() -> None:
    names, found = ("weight_bytes", "gradient_bytes", "optimizer_bytes"), 0
    layers = tuple(
        layer.model_copy(update={name: 300 * getattr(layer, name) for name in names})
        for layer in tied().layers
    )
    model = on_cuda(tied(), context_bytes=10**8).model_copy(update={"layers": layers})
    for tenths in range(90, 130, 5):
        cluster = flat_cluster(GPUS, 1e4, memory_bytes=30 * 10**6 * tenths)
        if next(every_plan(cluster, "1f1b-flush", 4, model), None) is not None:
            found += 1
            assert trains(solve(model, cluster, schedule="1f1b-flush", microbatches=4))
    assert 0 < found < 8


@pytest.mark.parametrize("memory_bytes", [None, 13 * 10**6, 20 * 10**6])
def test_a_usual_plan_has_room_for_its_copies(memory_bytes: int | None) -> None:
    """It is the answer where the search's plans have none, and takes no search itself."""
    setting = Setting(flat_cluster(GPUS, 1e4, memory_bytes), find("1f1b-flush"), 4)
    problem = Problem(LayerCosts(tied()), setting)
    pool = Pool(problem, 0.0)
    pool.consider_regular(regular_plans(problem))
    plan = pool.best
    assert plan is not None
    assert trains(assemble(problem, plan))
    assert copies_fit(problem.layer_costs, plan.stages, plan.price, setting)
    others = [
        evaluate(problem, each.stages) for each in regular_plans(problem) if pool.trains(each)
    ]
    assert plan.seconds <= min(each.seconds for each in others if pool.trains(each))


def test_an_answer_that_is_of_no_use_is_not_made_trainable() -> None:
    """Where another degree of divided layers is faster than any plan of this one, its copies do not
    matter.
    """
    problem = Problem(
        LayerCosts(tied()), Setting(flat_cluster(GPUS, 1e4, 10 * 10**6), find("1f1b-flush"), 4)
    )
    tried = {}
    for hopeless_s in (np.inf, 1e-6):
        pool = Pool(replace(problem, hopeless_s=hopeless_s), 1.0)
        tried[hopeless_s] = 0
        for attempt in attempts(pool):
            tried[hopeless_s] += 1
            with suppress(InfeasibleError):
                for batch in attempt.proposers[0].propose(attempt.problem, pool):
                    pool.consider(batch)
    assert tried[1e-6] == 1 < tried[np.inf]


def test_regular_plans_make_room_for_copies_of_a_large_embedding() -> None:
    """GPT-2 on four servers of eight, where no plan of a search has room for the copies.

    A regular plan has as many replicas in both stages with the embedding, so that they hold least.
    """
    model = load_profile(Path(__file__).parents[2] / "profiles" / "gpt2" / "cpu.json")
    cluster = hierarchical_cluster((8, 4), (1.25e10, 1.25e8), 2 * 10**9)
    plan = solve(model, cluster, schedule="1f1b-flush", microbatches=32, granularity="block")
    assert plan.predicted.seconds_per_minibatch < 17.6  # what an older search found
    assert max(plan.memory_bytes(number) for number in range(len(plan.stages))) <= 2 * 10**9


@pytest.mark.parametrize("memory_mb", range(9, 40, 3))
def test_copies_fit_beside_all_chunks_of_a_gpu(memory_mb: int) -> None:
    costs: dict[str, Any] = {"forward_s": 100, "backward_s": 200, "output_bytes": 8}
    blocks = [layer(f"l{k}", **costs, weight_bytes=10**6) for k in range(6)]
    made = profile(
        layer("embedding", **costs, weight_bytes=4 * 10**6), *blocks, layer("head", 100, 200)
    )
    names = [("embed.weight",), *((f"l{k}.weight",) for k in range(6)), ("embed.weight",)]
    layers = tuple(
        each.model_copy(update={"parameters": own, "optimizer_bytes": 2 * each.weight_bytes})
        for each, own in zip(made.layers, names, strict=True)
    )
    model = made.model_copy(update={"layers": layers})

    with suppress(PlannerError):  # some memories are too small
        plan = solve(
            model,
            flat_cluster(2, 1e3, memory_mb * 10**6),
            schedule="interleaved",
            microbatches=4,
            recompute="never",
        )
        assert plan.fits
