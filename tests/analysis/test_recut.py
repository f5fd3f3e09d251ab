"""Other cuts of a plan's own stages, beside all cuts there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

import planner
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
