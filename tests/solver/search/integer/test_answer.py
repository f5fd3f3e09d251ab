"""The methods agree, and say what they cannot do."""

from __future__ import annotations

import pytest

from planner.errors import InfeasibleError
from planner.formats.cluster import Cluster, DeviceKind, Level, flat_cluster
from planner.solver import search_plan as solve
from tests.samples import layer, profile

CHAIN = profile(*(layer(name, output_bytes=4, weight_bytes=100) for name in "abcd"))


def test_solvers_agree_and_say_who_they_are() -> None:
    plans = [solve(CHAIN, flat_cluster(2, 10.0, 900), solver=name) for name in ("search", "ilp")]
    assert len({plan.config for plan in plans}) == 1
    assert plans[0].solver.name == "search"
    assert plans[1].solver.name.startswith("ilp, ")
    assert all(plan.solver.status == "optimal" for plan in plans)


def test_memory_that_no_plan_fits_is_told() -> None:
    joined = CHAIN.model_copy(update={"no_cut_after": ("a",)})
    with pytest.raises(InfeasibleError, match="no plan fits 3 GPUs") as caught:
        solve(joined, flat_cluster(3, 1e9, 300))
    assert "`memory=" in caught.value.hint
    level = Level(size=2, bandwidth_bytes_per_s=1e9)
    mixed = Cluster(
        levels=(level,),
        memory_bytes=100,
        kinds=(DeviceKind(count=1), DeviceKind(count=1, speed=2.0)),
    )
    with pytest.raises(InfeasibleError, match="no plan fits the memory of the cluster's GPUs"):
        solve(CHAIN, mixed)


def test_time_limits_of_the_search_leave_a_plan_and_a_gap() -> None:
    layers = [
        layer(f"l{n}", 1 + n * 37 % 11, 2, output_bytes=1 + n * 29 % 7, weight_bytes=n)
        for n in range(60)
    ]
    for schedule in ("1f1b", "gpipe"):
        microbatches = 4 if schedule == "gpipe" else 1
        hurried = solve(
            profile(*layers),
            flat_cluster(8, 5.0),
            schedule=schedule,
            microbatches=microbatches,
            time_limit_s=0.0,
        )
        best = solve(
            profile(*layers), flat_cluster(8, 5.0), schedule=schedule, microbatches=microbatches
        )
        assert hurried.solver.lower_bound_s <= best.predicted.seconds_per_minibatch * (1 + 1e-9)
        assert hurried.solver.status == "feasible"
        assert hurried.solver.gap > 0
