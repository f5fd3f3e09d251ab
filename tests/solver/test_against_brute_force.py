"""Search == brute force, on random small models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import LayerCosts
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import link_of
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, StageRules
from planner.schedule.one_stage import TWO_BW
from planner.schedule.registry import find
from planner.solver import search_plan as solve
from planner.solver.problem.problem import Limits
from planner.solver.problem.replica_models import replica_model
from planner.solver.problem.states import Chain
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.units import parse_bytes
from tests.examples import examples
from tests.solver.brute import rank
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles

memories = st.one_of(st.none(), st.integers(1, 200))
bandwidths = st.sampled_from([0.5, 1.0, 2.0, 8.0, 1e4])
rules: st.SearchStrategy[RecomputeRule] = st.sampled_from(["auto", "auto", "never", "always"])
latencies = st.sampled_from([0.0, 0.0, 0.25, 3.0])


@settings(max_examples=examples(300), deadline=None)
@given(
    profile=profiles(most_layers=4, measured=True),
    gpus=st.integers(1, 4),
    bandwidth=bandwidths,
    latency=latencies,
    memory=memories,
    recompute=rules,
)
def test_asynchronous_search_finds_what_brute_force_finds(
    profile: Profile,
    gpus: int,
    bandwidth: float,
    latency: float,
    memory: int | None,
    recompute: RecomputeRule,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory, latency)
    layer_costs = LayerCosts(profile)
    space = Chain(layer_costs)
    found = Search(
        space, replica_model(link_of(cluster)), Limits(gpus, memory, StageRules(recompute))
    ).best()
    expected = brute_force(layer_costs, cluster, recompute=recompute)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    assert (
        found.gpus,
        len(found.replicas),
        sum(bool(each.recompute) for each in found.options),
    ) == rank(expected)


@settings(max_examples=examples(400), deadline=None)
@given(
    profile=profiles(most_layers=4, measured=True),
    gpus=st.integers(1, 5),
    microbatches=st.integers(1, 7),
    bandwidth=bandwidths,
    latency=latencies,
    memory=memories,
    recompute=rules,
)
def test_the_search_for_2bw_finds_what_brute_force_finds(
    profile: Profile,
    gpus: int,
    microbatches: int,
    bandwidth: float,
    latency: float,
    memory: int | None,
    recompute: RecomputeRule,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory, latency)
    layer_costs = LayerCosts(profile)
    model = replica_model(link_of(cluster), TWO_BW, microbatches)
    found = Search(Chain(layer_costs), model, Limits(gpus, memory, StageRules(recompute))).best()
    expected = brute_force(
        layer_costs, cluster, schedule=TWO_BW, microbatches=microbatches, recompute=recompute
    )
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    assert (
        found.gpus,
        len(found.replicas),
        sum(bool(each.recompute) for each in found.options),
    ) == rank(expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush"])
@settings(max_examples=examples(300), deadline=None)
@given(
    profile=profiles(most_layers=4, measured=True),
    gpus=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    bandwidth=bandwidths,
    latency=latencies,
    memory=memories,
    recompute=rules,
)
def test_synchronous_search_finds_what_brute_force_finds(
    schedule: str,
    profile: Profile,
    gpus: int,
    microbatches: int,
    bandwidth: float,
    latency: float,
    memory: int | None,
    recompute: RecomputeRule,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory, latency)
    layer_costs = LayerCosts(profile)
    model = SynchronousModel(link_of(cluster), find(schedule), microbatches)
    found = SynchronousSearch(
        Chain(layer_costs), model, Limits(gpus, memory, StageRules(recompute))
    ).best()
    expected = brute_force(
        layer_costs,
        cluster,
        schedule=find(schedule),
        microbatches=microbatches,
        recompute=recompute,
    )
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 1), ("gpipe", 3), ("1f1b-flush", 3)]
)
@settings(max_examples=examples(100), deadline=None)
@given(
    model=profiles(most_layers=4),
    gpus=st.integers(1, 3),
    bandwidth=st.sampled_from([0.5, 2.0, 8.0]),
    memory=st.one_of(st.none(), st.integers(1, 150)),
)
def test_solve_finds_what_brute_force_finds(
    schedule: str,
    microbatches: int,
    model: Profile,
    gpus: int,
    bandwidth: float,
    memory: int | None,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory)
    order, costs = find(schedule), LayerCosts(model)
    expected = brute_force(
        costs, cluster, schedule=order, microbatches=microbatches, in_order=False
    )
    try:
        plan = solve(
            model, cluster, schedule=schedule, microbatches=microbatches, depth="published"
        )
    except InfeasibleError as error:
        assert expected is None
        smallest = parse_bytes(error.hint.split("memory=")[1].split("`")[0])
        enough = flat_cluster(gpus, bandwidth, smallest)
        assert (
            brute_force(costs, enough, schedule=order, microbatches=microbatches, in_order=False)
            is not None
        )
        return
    assert expected is not None
    best_s = expected.price.seconds_per_minibatch
    # whose plans are chosen by their time with waits, which brute force does not count
    if schedule == "1f1b":
        # The simulation reduces the executor's buckets, of which the last may be less than the
        # formula's sixth.
        assert plan.solver.lower_bound_s == pytest.approx(
            min(best_s, plan.predicted.seconds_per_minibatch), rel=1e-9
        )
        assert plan.predicted.bottleneck.busy_s >= best_s * (1 - 1e-9)
    # which may be faster than the formula: one minibatch's updates go on beside the next one's
    # forwards
    else:
        exact_s = min(best_s, plan.predicted.seconds_per_minibatch)
        assert plan.solver.lower_bound_s <= exact_s * (1 + 1e-9)
        # Replicas that divide gradients and weights are bounded, not searched.
        if not model.may_shard_optimizer:
            assert plan.solver.lower_bound_s == pytest.approx(exact_s, rel=1e-9)
    assert plan.solver.lower_bound_s <= plan.predicted.seconds_per_minibatch * (1 + 1e-9)
