"""Bounds for graphs with too many cuts to list, and what is found in them all the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import encoder_decoder_like, nasnet_like, unet_like
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.link import Link, link_of
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.names import CostModelName
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, StageRules
from planner.schedule.registry import find
from planner.solver import solve
from planner.solver.problem.bounds import bounds_for
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.states import Chain
from planner.solver.search.chain.search import Search
from planner.solver.search.graph import branches
from planner.solver.search.graph.branches import search_beyond
from planner.solver.search.graph.lattice import around, to_bits
from planner.solver.search.graph.windows import Windows
from planner.solver.search.pipeline_search import PipelineSearch
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles


@pytest.mark.parametrize(
    ("name", "schedule", "microbatches"),
    [("resource", "1f1b", 1), ("pipedream", "1f1b", 1), ("paper", "1f1b", 1), ("resource", "2bw", 3)],
)
@settings(max_examples=examples(60), deadline=None)
@given(
    model=profiles(most_layers=5, measured=True),
    gpus=st.integers(1, 4),
    bandwidth=st.sampled_from([0.5, 2.0, 8.0]),
    memory=st.one_of(st.none(), st.integers(1, 200)),
    recompute=st.sampled_from(["auto", "never", "always"]),
)
def test_no_plan_is_faster_than_the_bound(
    name: CostModelName,
    schedule: str,
    microbatches: int,
    model: Profile,
    gpus: int,
    bandwidth: float,
    memory: int | None,
    recompute: RecomputeRule,
) -> None:
    layer_costs, cluster = LayerCosts(model), flat_cluster(gpus, bandwidth, memory)
    best = brute_force(
        layer_costs, cluster, model=name, schedule=find(schedule), microbatches=microbatches, recompute=recompute
    )
    windows = Windows(layer_costs, bounds_for(name, link_of(cluster), find(schedule), microbatches))
    bound_s = windows.bound_s(Limits(gpus, memory, StageRules(recompute)), 1e6)
    if best is not None:
        assert bound_s <= best.price.seconds_per_minibatch * (1 + 1e-9)


@pytest.mark.parametrize("name", ["resource", "pipedream", "paper"])
def test_on_a_chain_the_bound_is_the_optimum(name: CostModelName) -> None:
    draw = random.Random(1)
    chain = profile(
        *(
            layer(f"l{i}", draw.uniform(1, 5), draw.uniform(1, 9), draw.randint(1, 90), draw.randint(0, 99))
            for i in range(40)
        )
    )
    layer_costs, model = LayerCosts(chain), bounds_for(name, Link(50.0))
    best = Search(Chain(layer_costs), model, Limits(12)).best()
    assert best is not None
    bound_s = Windows(layer_costs, model).bound_s(Limits(12), 2 * best.seconds)
    assert best.seconds * (1 - 1e-3) <= bound_s <= best.seconds


@settings(max_examples=examples(100), deadline=None)
@given(model=profiles(most_layers=5), gpus=st.integers(2, 4), bandwidth=st.sampled_from([0.5, 2.0, 8.0]))
def test_what_is_found_among_cuts_too_many_to_list_is_honest(model: Profile, gpus: int, bandwidth: float) -> None:
    layer_costs, cluster = LayerCosts(model), flat_cluster(gpus, bandwidth)
    priced, chain = bounds_for("resource", Link(bandwidth)), Chain(layer_costs)
    known = Search(chain, priced, Limits(gpus)).best()
    assert known is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "MOST_DOWNSETS", 1)
        beyond = search_beyond(chain, priced, Limits(gpus), known)
    best = brute_force(layer_costs, cluster)
    assert best is not None
    best_s, found_s = best.price.seconds_per_minibatch, (beyond.path or known).seconds
    assert beyond.bound_s <= best_s * (1 + 1e-9)
    assert best_s <= found_s * (1 + 1e-9) <= known.seconds * (1 + 2e-9)


@given(model=profiles(most_layers=6))
def test_what_is_near_a_cut_is_a_cut(model: Profile) -> None:
    chain = Chain(LayerCosts(model))
    cut = chain.layers(0, len(chain) // 2)
    for bits in to_bits(around(chain.layer_costs, [cut], 20), len(model.layers)):
        inside = {index for index, bit in enumerate(bits) if bit}
        assert all(v.producer in inside for v in chain.layer_costs.traffic if inside & set(v.users))


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [4, 16])
def test_a_large_network_is_planned_no_worse_than_along_its_order(gpus: int) -> None:
    """1,220 layers and more cuts than could be listed."""
    model, cluster = nasnet_like(), flat_cluster(gpus, 1.25e9)
    layer_costs = LayerCosts(model)
    plan = solve(model, cluster, cost_model="pipedream")  # under which nobody waits, and busy times decide
    assert plan.solver.lower_bound_s < plan.predicted.bottleneck.busy_s < plan.solver.lower_bound_s * 1.35
    path = Search(Chain(layer_costs), bounds_for("pipedream", link_of(cluster)), Limits(gpus)).best()
    assert path is not None
    assert plan.predicted.bottleneck.busy_s <= path.seconds * (1 + 1e-9)
    again = solve(model, cluster, cost_model="pipedream")
    assert again.stages == plan.stages


@pytest.mark.parametrize("model", [unet_like(), encoder_decoder_like(layers=4)], ids=lambda model: model.model)
@pytest.mark.parametrize("name", ["resource", "pipedream"])
def test_long_skips_and_shared_outputs_are_solved_exactly(model: Profile, name: CostModelName) -> None:
    search = PipelineSearch(Problem(LayerCosts(model), Setting(flat_cluster(8, 1.25e9), cost_model=name)))
    path = search.best()
    assert path is not None
    found = search.extended(path)
    assert found.path is not None
    assert found.bound_s >= found.path.seconds * (1 - 1e-9)
