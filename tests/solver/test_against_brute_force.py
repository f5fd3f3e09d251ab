"""Search == brute force, on random small models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import LayerCosts
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import link_of
from planner.formats.cluster import flat_cluster
from planner.formats.names import CostModelName
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, StageRules
from planner.schedule.one_stage import TWO_BW
from planner.schedule.registry import find
from planner.solver.problem.bounds import bounds_for
from planner.solver.problem.problem import Limits
from planner.solver.problem.states import Chain
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.graph.downsets import Downsets, enumerate_downsets
from tests.examples import examples
from tests.solver.brute import downsets, rank
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles

COST_MODELS: tuple[CostModelName, ...] = ("resource", "pipedream", "paper")
memories = st.one_of(st.none(), st.integers(1, 200))
bandwidths = st.sampled_from([0.5, 1.0, 2.0, 8.0, 1e4])
rules: st.SearchStrategy[RecomputeRule] = st.sampled_from(["auto", "auto", "never", "always"])
latencies = st.sampled_from([0.0, 0.0, 0.25, 3.0])


@pytest.mark.parametrize("name", COST_MODELS)
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
    name: CostModelName,
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
    found = Search(space, bounds_for(name, link_of(cluster)), Limits(gpus, memory, StageRules(recompute))).best()
    expected = brute_force(layer_costs, cluster, model=name, recompute=recompute, in_order=True)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    assert (found.gpus, len(found.replicas), sum(bool(each.recompute) for each in found.options)) == rank(expected)


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
    model = bounds_for("resource", link_of(cluster), TWO_BW, microbatches)
    found = Search(Chain(layer_costs), model, Limits(gpus, memory, StageRules(recompute))).best()
    expected = brute_force(
        layer_costs, cluster, schedule=TWO_BW, microbatches=microbatches, recompute=recompute, in_order=True
    )
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    assert (found.gpus, len(found.replicas), sum(bool(each.recompute) for each in found.options)) == rank(expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush", "naive"])
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
    microbatches = 1 if schedule == "naive" else microbatches
    layer_costs = LayerCosts(profile)
    model = SynchronousModel(link_of(cluster), find(schedule), microbatches)
    found = SynchronousSearch(Chain(layer_costs), model, Limits(gpus, memory, StageRules(recompute))).best()
    expected = brute_force(
        layer_costs, cluster, schedule=find(schedule), microbatches=microbatches, recompute=recompute, in_order=True
    )
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)


@pytest.mark.parametrize("name", COST_MODELS)
@settings(max_examples=examples(200), deadline=None)
@given(
    profile=profiles(most_layers=4),
    gpus=st.integers(1, 4),
    bandwidth=bandwidths,
    latency=latencies,
    memory=memories,
)
def test_search_over_downsets_finds_what_brute_force_finds_over_all_cuts(
    name: CostModelName,
    profile: Profile,
    gpus: int,
    bandwidth: float,
    latency: float,
    memory: int | None,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory, latency)
    layer_costs, model = LayerCosts(profile), bounds_for(name, link_of(cluster))
    words = enumerate_downsets(layer_costs, 1000)
    assert words is not None
    space = Downsets(layer_costs, words, complete=True)
    assert {frozenset(space.layers(0, state)) for state in range(len(space))} == set(downsets(layer_costs))
    found = Search(space, model, Limits(gpus, memory)).best()
    expected = brute_force(layer_costs, cluster, model=name)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    assert (found.gpus, len(found.replicas), sum(bool(each.recompute) for each in found.options)) == rank(expected)
