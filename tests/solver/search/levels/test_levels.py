"""Search on clusters of several levels: close to brute force on random small models, and never
below its bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster, hierarchical_cluster
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, StageRules
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.problem.problem import Problem
from planner.solver.problem.states import Chain
from planner.solver.search.levels.flat import nearest_search
from planner.solver.search.levels.levels import search_levels
from tests import samples
from tests.examples import examples
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles

SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b-flush")
NEAR_BEST = 1.1  # how much worse than brute force a plan may be where the bounds do not prove it
SIZES = [(2, 2), (2, 3), (3, 2), (1, 4), (2, 1, 2)]
LARGER = [(2, 4), (4, 2), (2, 2, 2)]
recomputing = st.sampled_from(["auto", "auto", "never", "always"])


@st.composite
def clusters(draw: st.DrawFn, sizes: Sequence[tuple[int, ...]] = SIZES) -> Cluster:
    """Two or three levels, faster inside or not, with shared links or without."""
    members = draw(st.sampled_from(sizes))
    bandwidths = [draw(st.sampled_from([0.5, 1.0, 3.0, 16.0])) for _ in members]
    latencies = [draw(st.sampled_from([0.0, 0.0, 0.5])) for _ in members]
    memory = draw(st.one_of(st.none(), st.integers(1, 120)))
    return hierarchical_cluster(
        members,
        bandwidths,
        memory,
        latencies,
        shared=draw(st.booleans()),
        overlap=draw(st.booleans()),
    )


def check(
    profile: Profile,
    cluster: Cluster,
    schedule: str = "1f1b",
    microbatches: int = 1,
    recompute: RecomputeRule = "auto",
) -> None:
    """The search answers what brute force does, up to `NEAR_BEST`, and its bound holds."""
    layer_costs = LayerCosts(profile)
    space = Chain(layer_costs)
    setting = Setting(cluster, find(schedule), microbatches)
    problem = Problem(layer_costs, setting, StageRules(recompute, "never"))
    nearest = nearest_search(problem, space, problem.limits).best()
    expected = brute_force(
        layer_costs,
        cluster,
        schedule=find(schedule),
        microbatches=microbatches,
        recompute=recompute,
        shard="never",
    )
    if expected is None:
        assert nearest is None
        return
    assert nearest is not None
    found = search_levels(problem, space, nearest)
    assert found.path is not None
    best_s = expected.price.seconds_per_minibatch
    assert best_s * (1 - 1e-9) <= found.path.seconds <= best_s * NEAR_BEST
    assert found.bound_s <= best_s * (1 + 1e-9)
    assert nearest.seconds <= found.path.seconds * (1 + 1e-9)


@pytest.mark.sampled(2)
@settings(max_examples=examples(80), deadline=None)
@given(profile=profiles(most_layers=4), cluster=clusters(), recompute=recomputing)
def test_asynchronous_plans(profile: Profile, cluster: Cluster, recompute: RecomputeRule) -> None:
    check(profile, cluster, recompute=recompute)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=examples(80), deadline=None)
@given(
    profile=profiles(most_layers=4),
    cluster=clusters(),
    microbatches=st.integers(1, 5),
    recompute=recomputing,
)
def test_plans_that_drain(
    schedule: str, profile: Profile, cluster: Cluster, microbatches: int, recompute: RecomputeRule
) -> None:
    check(
        profile,
        cluster,
        schedule=schedule,
        microbatches=microbatches,
        recompute=recompute,
    )


def test_an_idle_replica_may_let_the_next_stage_begin_at_a_server() -> None:
    front = samples.layer("front", 1.0, 0.0, update_s=1.0)
    back = samples.layer("back", 0.0, 2.0, weight_bytes=1)
    cluster = hierarchical_cluster(
        (4, 2), (0.5, 0.5), None, (0.0, 0.5), shared=False, overlap=False
    )
    check(samples.profile(front, back), cluster, schedule="gpipe", microbatches=3)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    profile=profiles(most_layers=6),
    cluster=clusters(sizes=LARGER),
    schedule=st.sampled_from(["1f1b", "gpipe", "1f1b-flush"]),
)
def test_larger_models_on_eight_gpus(profile: Profile, cluster: Cluster, schedule: str) -> None:
    check(
        profile,
        cluster,
        schedule=schedule,
        microbatches=1 if schedule == "1f1b" else 3,
        recompute="never",
    )


def test_a_model_has_no_plan_where_only_another_order_of_its_layers_fits() -> None:
    """Two layers that do not need each other, and GPUs that hold two versions of the weights of
    `back` only.

    Weights and gradients: 30 bytes for `front` in a first stage of two, 20 in the last; 26 for both
    in one stage.
    """
    front, back = samples.layer("front", weight_bytes=10), samples.layer("back", weight_bytes=3)
    for graph_hash in ("known", None):
        profile = samples.profile(front, back).model_copy(update={"graph_hash": graph_hash})
        with pytest.raises(InfeasibleError) as caught:
            solve(profile, hierarchical_cluster((2, 2), (2.0, 1.0), 25))
        assert "`memory=26B`" in caught.value.hint


@pytest.mark.sampled(3)
@settings(max_examples=examples(80), deadline=None)
@given(profile=profiles(most_layers=4), cluster=clusters())
def test_what_no_plan_can_beat_is_no_more_than_the_best_plan(
    profile: Profile, cluster: Cluster
) -> None:
    expected = brute_force(LayerCosts(profile), cluster)
    if expected is None:
        with pytest.raises(InfeasibleError):
            solve(profile, cluster)
        return
    plan = solve(profile, cluster)
    best_s = expected.price.seconds_per_minibatch
    assert plan.solver.lower_bound_s <= best_s * (1 + 1e-9) or plan.solver.status == "optimal"


def test_fifteen_and_one_on_four_servers_of_four() -> None:
    """A light front with few weights and a heavy end with many: all ranks but one, whatever the
    servers.
    """
    front = samples.layer("front", 14.0, 1.0, output_bytes=10, weight_bytes=1)
    back = samples.layer("back", 0.9, 0.1, weight_bytes=10**6)
    plan = solve(samples.profile(front, back), hierarchical_cluster((4, 4), (1e6, 1e5)))
    assert plan.config == "15-1"
    assert plan.stages[1].ranks == (15,)
