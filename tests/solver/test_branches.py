"""Cuts of graphs with branches are those of the definition, and searches over them find what brute
force finds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import link_of
from planner.cost.setting import Setting
from planner.errors import InfeasibleError
from planner.formats.cluster import flat_cluster, hierarchical_cluster
from planner.formats.plan_parts import ALONG_ORDER
from planner.formats.profile import Profile
from planner.options.solving import RecomputeRule, SolveOptions, StageRules
from planner.schedule.one_stage import ONE_F_ONE_B, TWO_BW
from planner.schedule.registry import find
from planner.schedule.schedule import Schedule
from planner.solver.problem.downsets import Downsets
from planner.solver.problem.layer_graph import LayerGraph
from planner.solver.problem.problem import Limits, Problem
from planner.solver.problem.replica_models import replica_model
from planner.solver.request import Request
from planner.solver.search.chain.search import Search
from planner.solver.search.chain.synchronous import SynchronousSearch
from planner.solver.search.pipeline_search import PipelineSearch
from planner.solver.solve import solve
from planner.solver.tuning.record import STANDARD
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver import brute
from tests.solver.oracle import brute_force
from tests.solver.strategies import profiles

EVERY = 10**6
NEAR_BEST = 1.1  # how far local search may be from the best plan on levels, as along the order
memories = st.one_of(st.none(), st.integers(1, 200))
bandwidths = st.sampled_from([0.5, 1.0, 2.0, 8.0, 1e4])
rules: st.SearchStrategy[RecomputeRule] = st.sampled_from(
    ["auto", "auto", "never", "always", "blocks"]
)
drawn = st.booleans().flatmap(lambda measured: profiles(most_layers=6, measured=measured))
small = st.booleans().flatmap(lambda measured: profiles(most_layers=5, measured=measured))


def every_cut(layer_costs: LayerCosts) -> Downsets:
    graph = LayerGraph(layer_costs)
    downsets = graph.downsets(EVERY)
    assert downsets is not None
    return Downsets(layer_costs, graph.flags(downsets))


@settings(max_examples=examples(300), deadline=None)
@given(model=drawn)
def test_downsets_are_those_of_the_definition(model: Profile) -> None:
    layer_costs = LayerCosts(model)
    expected = set(brute.downsets(layer_costs))
    graph = LayerGraph(layer_costs)
    downsets = graph.downsets(EVERY)
    assert downsets is not None

    assert {frozenset(np.flatnonzero(row).tolist()) for row in graph.flags(downsets)} == expected
    assert len(downsets) == len(expected)
    assert graph.downsets(len(expected) - 1) is None
    for downset in downsets:
        assert graph.nearest(downset, EVERY) <= set(downsets)
        assert downset in graph.nearest(downset, 1)
        assert graph.with_groups_moved(downset, EVERY) <= set(downsets)
        assert len(graph.with_groups_moved(downset, 2)) <= 2


@settings(max_examples=examples(200), deadline=None)
@given(model=drawn)
def test_states_contain_each_other_as_their_layers_do(model: Profile) -> None:
    space = every_cut(LayerCosts(model))
    sets = [space.members(0, state) for state in range(len(space))]
    for state, layers in enumerate(sets):
        assert space.state_of(layers) == state
        assert [other for other, inside in enumerate(sets) if layers < inside] == space.after(
            state
        ).tolist()
        for other in space.after(state).tolist():
            between = [
                middle for middle, inside in enumerate(sets) if layers < inside < sets[other]
            ]
            assert between == space.between(state, other).tolist()
            assert space.members(state, other) == sets[other] - layers
    assert all(
        np.array_equal(space.holds(layer), [layer in each for each in sets]) for layer in sets[-1]
    )


@settings(max_examples=examples(200), deadline=None)
@given(model=small)
def test_vectorised_stages_are_those_of_the_definition(model: Profile) -> None:
    layer_costs = LayerCosts(model)
    space = every_cut(layer_costs)
    for state in range(len(space) - 1):
        others = space.after(state)
        work = space.work(state, others)
        footprint = space.footprint(state, others, work)
        for column, other in enumerate(others.tolist()):
            stage = Candidate(space.members(0, state), space.members(state, other))
            for fast, plain in (
                (work, layer_costs.work(stage)),
                (footprint, layer_costs.footprint(stage)),
            ):
                for name in vars(plain):
                    column_of = np.broadcast_to(getattr(fast, name), others.shape)[column]
                    assert column_of == pytest.approx(getattr(plain, name)), name


@settings(max_examples=examples(150), deadline=None)
@given(
    model=small,
    schedule=st.sampled_from([ONE_F_ONE_B, TWO_BW]),
    gpus=st.integers(2, 4),
    microbatches=st.integers(1, 6),
    bandwidth=bandwidths,
    memory=memories,
    recompute=rules,
)
def test_asynchronous_plans_over_all_cuts(
    model: Profile,
    schedule: Schedule,
    gpus: int,
    microbatches: int,
    bandwidth: float,
    memory: int | None,
    recompute: RecomputeRule,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory)
    layer_costs = LayerCosts(model)
    many = microbatches if schedule is TWO_BW else 1
    bounds = replica_model(link_of(cluster), schedule, many)
    found = Search(
        every_cut(layer_costs), bounds, Limits(gpus, memory, StageRules(recompute))
    ).best()
    expected = brute_force(
        layer_costs,
        cluster,
        schedule=schedule,
        microbatches=many,
        recompute=recompute,
        in_order=False,
    )
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)
    assert (found.gpus, len(found.replicas)) == brute.rank(expected)[:2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush"])
@settings(max_examples=examples(100), deadline=None)
@given(
    model=small,
    gpus=st.integers(2, 4),
    microbatches=st.integers(1, 6),
    bandwidth=bandwidths,
    memory=memories,
    recompute=rules,
)
def test_synchronous_plans_over_all_cuts(
    schedule: str,
    model: Profile,
    gpus: int,
    microbatches: int,
    bandwidth: float,
    memory: int | None,
    recompute: RecomputeRule,
) -> None:
    cluster = flat_cluster(gpus, bandwidth, memory)
    layer_costs = LayerCosts(model)
    drains = SynchronousModel(link_of(cluster), find(schedule), microbatches)
    found = SynchronousSearch(
        every_cut(layer_costs), drains, Limits(gpus, memory, StageRules(recompute))
    ).best()
    expected = brute_force(
        layer_costs,
        cluster,
        schedule=find(schedule),
        microbatches=microbatches,
        recompute=recompute,
        in_order=False,
    )
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(expected.price.seconds_per_minibatch, rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(
    model=small,
    schedule=st.sampled_from(["1f1b", "1f1b-flush"]),
    gpus=st.integers(2, 3),
    bandwidth=bandwidths,
    memory=st.one_of(st.none(), st.integers(20, 200)),
    few=st.booleans(),
)
def test_an_answer_to_a_user_is_bounded_by_brute_force(
    model: Profile, schedule: str, gpus: int, bandwidth: float, memory: int | None, few: bool
) -> None:
    """Where all cuts are searched the bound is the best time of all plans, otherwise it is below
    what it speaks of.
    """
    microbatches = 1 if schedule == "1f1b" else 3
    cluster = flat_cluster(gpus, bandwidth, memory)
    costs = LayerCosts(model)

    def best_s(*, in_order: bool) -> float | None:
        best = brute_force(
            costs,
            cluster,
            schedule=find(schedule),
            microbatches=microbatches,
            shard="never",
            in_order=in_order,
        )
        return None if best is None else best.price.seconds_per_minibatch

    most = EVERY if few else 0
    branches = replace(STANDARD.branches, most_downsets=most, most_choosing_downsets=most)
    options = SolveOptions(
        schedule=schedule,
        microbatches=None if schedule == "1f1b" else microbatches,
        depth="published",
        shard_optimizer="never",
    )
    try:
        plan = solve(Request.of(model, cluster, options, replace(STANDARD, branches=branches)))
    except InfeasibleError:
        assert best_s(in_order=not few) is None
        return
    if plan.schedule.name != schedule:  # a synchronous plan in its place
        return
    anywhere_s, along_s = best_s(in_order=False), best_s(in_order=True)
    assert anywhere_s is not None
    limit_s = along_s if ALONG_ORDER in plan.solver.bound_of else anywhere_s
    assert limit_s is not None
    assert plan.solver.lower_bound_s <= limit_s * (1 + 1e-9)
    if few and schedule == "1f1b" and plan.solver.name == "search":
        exact_s = min(anywhere_s, plan.predicted.seconds_per_minibatch)
        assert plan.solver.lower_bound_s == pytest.approx(exact_s, rel=1e-9)
    if few:
        assert plan.solver.cost_model_s is not None
        assert plan.solver.cost_model_s >= anywhere_s * (1 - 1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(
    model=small, bandwidth=bandwidths, memory=memories, schedule=st.sampled_from(["1f1b", "gpipe"])
)
def test_no_plan_on_levels_is_below_the_bound(
    model: Profile, bandwidth: float, memory: int | None, schedule: str
) -> None:
    """Two servers of two GPUs, whose links differ."""
    cluster = hierarchical_cluster((2, 2), (4 * bandwidth, bandwidth), memory)
    costs = LayerCosts(model)
    many = 1 if schedule == "1f1b" else 3
    problem = Problem(
        costs, Setting(cluster, find(schedule), many), StageRules(shard_optimizer="never")
    )
    expected = brute_force(
        costs, cluster, schedule=find(schedule), microbatches=many, shard="never", in_order=False
    )
    search = PipelineSearch(problem, every_cut(costs))
    path = search.best()
    if expected is None:
        assert path is None
        return
    assert path is not None
    found = search.bounded(path)
    assert found.path is not None
    best_s = expected.price.seconds_per_minibatch
    assert best_s * (1 - 1e-9) <= found.path.seconds <= best_s * NEAR_BEST
    assert found.bound_s <= best_s * (1 + 1e-9)


def test_tied_weights_on_branches_have_a_plan() -> None:
    """Plans that count every copy are found along the order, and all others over every cut."""
    names = [f"{tower}{number}" for number in range(3) for tower in "ab"]
    towers = [layer(name, 1, 2, output_bytes=10, weight_bytes=100) for name in names]
    stem = layer("stem", 1, 2, output_bytes=10, weight_bytes=100)
    ends = [stem, layer("head", 1, 2)]
    stem, head = (each.model_copy(update={"parameters": ("w",)}) for each in ends)
    edges = [("stem", "a0"), ("stem", "b0"), ("a2", "head"), ("b2", "head")]
    edges += [(f"{tower}{n}", f"{tower}{n + 1}") for tower in "ab" for n in range(2)]
    model = profile(stem, *towers, head, edges=edges)
    for bandwidth in (1.0, 20.0, 100.0):
        plan = planner.solve(model, flat_cluster(4, bandwidth), schedule="1f1b")
        held = [name for stage in plan.stages for name in stage.layers]
        assert sorted(held) == sorted(each.name for each in model.layers)


def test_layers_that_take_no_time_are_no_matter() -> None:
    """Their bytes for each second of theirs are more than a number can be."""
    model = profile(
        layer("first", 1, 0, output_bytes=1),
        layer("left", 0, 0, output_bytes=1),
        layer("right", 0, 0, output_bytes=1, weight_bytes=10**6),
        layer("last", 0, 0),
        edges=[("first", "left"), ("first", "right"), ("left", "last"), ("right", "last")],
    )
    plan = planner.solve(model, flat_cluster(2, 0.5, 10**9), schedule="1f1b-flush", microbatches=3)
    assert plan.config == "1"
