"""Other cuts of a plan's own stages, beside all cuts there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

import planner
from planner.analysis.few_kinds import with_few_kinds
from planner.analysis.recut import recut
from planner.api.corrected import corrected
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.solver.clock import NO_LIMIT
from tests.analysis.test_measured_cluster import run_on, slower
from tests.samples import profile
from tests.simulator.plans import equal_layers

LAYERS = 9
PLANNED = flat_cluster(3, 1e4)


@pytest.fixture(scope="module")
def model() -> Profile:
    layers = equal_layers(LAYERS, output_bytes=1000, weight_bytes=10_000_000, saved_bytes=5)
    return profile(*layers)


@pytest.fixture(scope="module")
def plan(model: Profile) -> Plan:
    return planner.price(model, PLANNED, (3, 3, 3), schedule="1f1b-flush", microbatches=6)


def seconds_of(model: Profile, cluster: Cluster, ends: tuple[int, ...]) -> float:
    edges = [0, *ends, LAYERS]
    counts = [end - first for first, end in pairwise(edges)]
    cut = planner.price(model, cluster, counts, schedule="1f1b-flush", microbatches=6)
    return cut.predicted.seconds_per_minibatch


@pytest.mark.parametrize("speeds", [(1.0, 0.4, 1.0), (0.5, 1.0, 1.0), (1.0, 1.0, 0.3)])
def test_it_is_about_as_fast_as_the_best_of_all_cuts(
    model: Profile, plan: Plan, speeds: tuple[float, ...]
) -> None:
    cluster = slower(PLANNED, *speeds)
    found = recut(model, plan, cluster, NO_LIMIT)
    least_s = min(seconds_of(model, cluster, ends) for ends in combinations(range(1, LAYERS), 2))
    assert found.predicted.seconds_per_minibatch == pytest.approx(least_s, rel=0.03)
    assert [stage.ranks for stage in found.stages] == [stage.ranks for stage in plan.stages]


def test_a_run_keeps_all_its_workers(model: Profile, plan: Plan) -> None:
    run = run_on(plan, slower(PLANNED, 1.0, 1.0, 0.15))
    answer = corrected(model, plan, run)
    assert answer.better is not None
    assert answer.better.workers == plan.workers
    assert len(answer.better.stages[2].layers) == 1


def test_many_kinds_are_searched_as_a_few() -> None:
    cluster = slower(flat_cluster(6, 1e4), 1.0, 0.95, 0.9, 0.5, 0.86, 0.45)
    few = with_few_kinds(cluster, 2)
    assert [kind.speed for kind in few.kinds] == pytest.approx(
        [0.93, 0.93, 0.93, 0.475, 0.93, 0.475], rel=0.01
    )
    assert with_few_kinds(cluster, 6) == cluster


def test_a_run_on_noisy_devices_is_answered() -> None:
    layers = equal_layers(24, output_bytes=1000, weight_bytes=10_000_000, saved_bytes=5)
    model = profile(*layers)
    plan = planner.price(
        model, flat_cluster(6, 1e4), (4,) * 6, schedule="1f1b-flush", microbatches=12
    )
    run = run_on(plan, slower(plan.cluster, 1.0, 0.93, 0.85, 0.4, 0.79, 0.72))
    answer = corrected(model, plan, run)
    assert answer.better is not None
    assert answer.better.workers == 6
    assert answer.better.predicted.seconds_per_minibatch < answer.expected_s
