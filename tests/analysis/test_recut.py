"""Other cuts of a plan's own stages, beside all cuts there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

import planner
from planner.analysis.few_kinds import with_few_kinds
from planner.analysis.idle_workers import without_idle_workers
from planner.analysis.recut import recut
from planner.api.corrected import _preferred, corrected
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster
from planner.formats.drift import Corrected
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.plan.left_out import why_nobody
from planner.solver.clock import NO_LIMIT
from planner.solver.tuning.record import STANDARD
from tests.analysis.test_measured_cluster import run_on, slower
from tests.samples import layer, profile
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


def test_a_worker_that_is_worth_its_place_stays(model: Profile, plan: Plan) -> None:
    answer = corrected(model, plan, run_on(plan, slower(PLANNED, 1.0, 1.0, 0.4)))
    assert answer.better is not None
    assert answer.better.workers == plan.workers


def test_one_that_is_not_is_left_out_and_taken_in_again(model: Profile, plan: Plan) -> None:
    slow = slower(PLANNED, 1.0, 1.0, 0.05)
    without = corrected(model, plan, run_on(plan, slow)).better
    assert without is not None
    assert without.ranks == {0, 1}
    assert without.microbatches == plan.microbatches

    def sought(ratio: float) -> Corrected:
        """What is found when worker 2 measures so many times the seconds that it had then."""
        return corrected(model, without, run_on(without, slow), left_out={2: ratio})

    assert sought(1.0).better is None
    assert sought(0.8).better is None
    again = sought(0.05).better
    assert again is not None
    assert again.ranks == {0, 1, 2}
    assert again.predicted.seconds_per_minibatch == pytest.approx(
        plan.predicted.seconds_per_minibatch, rel=0.02
    )


def test_a_worker_with_the_loss_alone_is_left_out_and_taken_in_again() -> None:
    """Nothing that it computes would tell that its device has recovered."""
    layers = equal_layers(LAYERS, output_bytes=1000, weight_bytes=10_000_000, saved_bytes=5)
    tiny = layer("loss", 0.0001, 0.0001)
    model = profile(*layers, tiny)
    planned = planner.price(model, PLANNED, (3, 3, 4), schedule="1f1b-flush", microbatches=6)
    slow = slower(PLANNED, 1.0, 1.0, 0.05)

    alone = planner.price(model, slow, (5, 4, 1), schedule="1f1b-flush", microbatches=6)
    found = without_idle_workers(model, alone, slow, 0.1)
    assert [stage.ranks for stage in found.stages] == [(0,), (1,)]
    assert [len(stage.layers) for stage in found.stages] == [5, 5]
    other = planner.price(model, slow, (1, 5, 4), schedule="1f1b-flush", microbatches=6)
    assert without_idle_workers(model, other, slow, 0.1) is other

    without = corrected(model, planned, run_on(planned, slow)).better
    assert without is not None
    assert without.ranks == {0, 1}
    again = corrected(model, without, run_on(without, slow), left_out={2: 0.05}).better
    assert again is not None
    assert again.ranks == {0, 1, 2}


def test_nobody_is_left_out_where_replicas_divide_what_they_have(model: Profile) -> None:
    one = flat_cluster(1, 1e4)
    plan = planner.solve(model, one, schedule="1f1b-flush", microbatches=6, time_limit_s=5)
    busy = planner.price(model, PLANNED, (3, 3, 3), schedule="1f1b-flush", microbatches=6)
    stages = tuple(replace(stage, sharded=True, sharding_level=3) for stage in plan.stages)
    assert why_nobody(plan) == ""
    assert "shard gradients or weights" in why_nobody(replace(plan, stages=stages))
    assert _preferred(replace(plan, stages=stages), busy, STANDARD) is busy


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


def test_other_cuts_fit_the_memory_of_all_devices() -> None:
    """Of six and two layers, which would be faster, the first device could not hold six."""
    layers = equal_layers(8, output_bytes=10, weight_bytes=100, saved_bytes=100)
    cluster = flat_cluster(2, 1000.0, 1700)
    before = planner.price(profile(*layers), cluster, (4, 4), schedule="1f1b-flush", microbatches=8)
    slow = replace(cluster, kinds=(DeviceKind(count=1), DeviceKind(count=1, speed=0.5)))
    after = recut(profile(*layers), before, slow, NO_LIMIT)
    assert after.fits
    unlimited = flat_cluster(2, 1000.0)
    free = replace(unlimited, kinds=slow.kinds)
    found = recut(profile(*layers), replace(before, cluster=unlimited), free, NO_LIMIT)
    assert [len(stage.layers) for stage in found.stages] == [6, 2]
