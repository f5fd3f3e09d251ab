"""The search for GPUs of several kinds: against the integer program, and where that one cannot go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InfeasibleError, InputError
from planner.formats.cluster import Cluster, DeviceKind, Level
from planner.formats.profile import Profile
from planner.solver import solve
from planner.solver.chain.mixed import solve_mixed
from planner.solver.integer.ilp import solve_ilp
from planner.solver.integer.milp import installed
from planner.solver.problem import Problem
from planner.solver.stage_rules import StageRules
from tests.samples import layer, profile
from tests.solver.strategies import profiles

PLAIN = StageRules("never", "never")
CHAIN = profile(*(layer(name, output_bytes=4, weight_bytes=100) for name in "abcd"))


def mixed(fast: int, slow: int) -> Cluster:
    """GPUs of which the first are twice as fast as the others."""
    level = Level(size=fast + slow, bandwidth_bytes_per_s=2.0)
    return Cluster(levels=(level,), kinds=(DeviceKind(count=fast, speed=2.0), DeviceKind(count=slow)))


@settings(max_examples=15, deadline=None)
@given(profile=profiles(most_layers=4), fast=st.integers(1, 2), slow=st.integers(1, 2))
def test_the_search_is_near_the_integer_program(profile: Profile, fast: int, slow: int) -> None:
    problem = Problem(LayerCosts(profile), Setting(mixed(fast, slow), cost_model="paper"), PLAIN)
    found, program = solve_mixed(problem), solve_ilp(problem, installed()[0])
    assert program is not None
    assert found.bound_s <= program.seconds * (1 + 1e-9)
    assert program.bound_s * (1 - 1e-6) <= found.best.seconds <= program.seconds * 1.5


def test_fast_gpus_get_more_layers_on_ranks_of_their_kind() -> None:
    plan = solve(CHAIN, mixed(1, 1), solver="search", recompute="never")
    assert plan.solver.name == "search"
    assert {stage.ranks for stage in plan.stages} <= {(0,), (1,)}
    parts = {stage.ranks: len(stage.layers) for stage in plan.stages}
    assert parts.get((0,), 0) > parts.get((1,), 0)


def test_kinds_on_several_levels_have_plans_whose_price_knows_the_places() -> None:
    levels = (Level(size=2, bandwidth_bytes_per_s=64.0), Level(size=2, bandwidth_bytes_per_s=1.0))
    cluster = Cluster(levels=levels, kinds=(DeviceKind(count=2, speed=2.0), DeviceKind(count=2)))
    plan = solve(CHAIN, cluster)
    assert plan.solver.status == "feasible"
    for stage in plan.stages:
        assert len({cluster.kind_of(rank) for rank in stage.ranks}) == 1
    with pytest.raises(InputError, match="clusters of one level"):
        solve(CHAIN, cluster, solver="ilp")


def test_memory_of_each_kind_is_kept() -> None:
    levels = (Level(size=2, bandwidth_bytes_per_s=64.0), Level(size=1, bandwidth_bytes_per_s=1.0))
    for memory, fits in ((900, True), (100, False)):
        kinds = (DeviceKind(count=1, speed=2.0, memory_bytes=memory), DeviceKind(count=1, memory_bytes=memory))
        cluster = Cluster(levels=levels, kinds=kinds)
        if fits:
            plan = solve(CHAIN, cluster, solver="search", recompute="never")
            assert all(stage.memory.total_bytes <= memory for stage in plan.stages)
        else:
            with pytest.raises(InfeasibleError, match="no plan was found that fits"):
                solve(CHAIN, cluster, solver="search", recompute="never")
