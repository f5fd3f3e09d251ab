"""The search under the max-load objective, against every chain of cuts, and the published workloads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import Ledger
from planner.cost.pricing import price
from planner.errors import InfeasibleError, InputError, ProfileError
from planner.formats.cluster import Cluster, Kind, Level, flat_cluster
from planner.formats.constraints import Constraints
from planner.formats.pipedream import read_profile
from planner.formats.profile import Profile
from planner.formats.workload import BYTES_PER_S
from planner.solver import solve
from planner.solver.candidates.deadline import NO_HURRY
from planner.solver.integer.ilp import solve_ilp
from planner.solver.integer.max_load import solve_loads
from planner.solver.integer.request import Request
from tests.samples import layer, profile
from tests.solver.integer.test_ilp import every_plan
from tests.solver.strategies import profiles

WORKLOADS = Path(__file__).resolve().parents[4] / "shared" / "anchors" / "dnn-partitioning"
HOST = Kind(count=1, speed=0.1, memory_bytes=2**60, pays_transfers=False)


def fastest(ledger: Ledger, cluster: Cluster) -> float:
    best = math.inf
    for stages in every_plan(ledger, cluster):
        if any(stage.replicas > 1 for stage in stages):
            continue
        cost = price(ledger, stages, cluster, model="max-load")
        limits = [cluster.memory_of(stage.kind) for stage in stages]
        if all(limit is None or m.total_bytes <= limit for m, limit in zip(cost.memory, limits, strict=True)):
            best = min(best, cost.seconds_per_minibatch)
    return best


@settings(max_examples=200, deadline=None)
@given(
    model=profiles(most_layers=5),
    gpus=st.integers(1, 3),
    bandwidth=st.sampled_from([0.5, 1.0, 8.0, 1e4]),
    latency=st.sampled_from([0.0, 0.25]),
    memory=st.one_of(st.none(), st.integers(1, 200)),
    host=st.booleans(),
    through_ilp=st.integers(0, 4),
)
def test_search_and_integer_program_find_the_best_chain_of_cuts(
    model: Profile, gpus: int, bandwidth: float, latency: float, memory: int | None, host: bool, through_ilp: int
) -> None:
    level = Level(size=gpus + host, bandwidth_bytes_per_s=bandwidth, latency_s=latency)
    kinds = (Kind(count=gpus), HOST) if host else ()
    cluster = Cluster(levels=(level,), memory_bytes=memory, kinds=kinds)
    request = Request(Ledger(model), cluster, "max-load")
    expected = fastest(request.ledger, cluster)
    for answer in (solve_loads(request, NO_HURRY), solve_ilp(request, NO_HURRY) if through_ilp == 0 else None):
        if answer is None:
            assert expected == math.inf or through_ilp
            continue
        assert answer.optimal
        assert answer.seconds == pytest.approx(expected, rel=1e-9)
        assert request.priced(answer.stages).seconds_per_minibatch == pytest.approx(expected, rel=1e-9)


# maxFPGAs devices of the file alone, and with its one CPU, ten times slower, which pays for no transfers.
PUBLISHED = [
    ("bert24", False, 41.7458),
    ("bert24", True, 41.7458),
    ("resnet50", False, 80.4549),
    ("resnet50", True, 78.6318),
    ("gnmt", False, 107.004),
    ("gnmt", True, 107.004),
]


@pytest.mark.parametrize(("name", "host", "milliseconds"), PUBLISHED)
def test_published_workloads(name: str, host: bool, milliseconds: float) -> None:
    if not WORKLOADS.is_dir():
        pytest.skip(f"the published workloads are not at {WORKLOADS}")
    model = read_profile(WORKLOADS / f"{name}_training.json")
    assert model.device.memory_bytes is not None
    cluster = flat_cluster(6, BYTES_PER_S, model.device.memory_bytes)
    if host:
        level = Level(size=7, bandwidth_bytes_per_s=BYTES_PER_S)
        cluster = Cluster(levels=(level,), memory_bytes=model.device.memory_bytes, kinds=(Kind(count=6), HOST))
    plan = solve(model, cluster, cost_model="max-load")
    assert plan.predicted.seconds_per_minibatch * 1e3 == pytest.approx(milliseconds, rel=6e-6)
    assert plan.solver.status == "optimal"
    assert plan.solver.name == "search"


def workload(**changes: object) -> dict[str, object]:
    """Two operations, forward and backward."""
    node = {"supportedOnFpga": 1, "cpuLatency": 1.0, "size": 5.0}
    nodes = [
        {"id": n, "name": f"n{n}", "fpgaLatency": 1.0 + n, "isBackwardNode": n // 2, "colorClass": n % 2, **node}
        for n in range(4)
    ]
    edges = [{"sourceId": 0, "destId": 1, "cost": 0.5}, {"sourceId": 2, "destId": 3, "cost": 0.25}]
    return {"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 0, "nodes": nodes, "edges": edges, **changes}


def test_a_workload_becomes_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(workload()))
    model = read_profile(file)
    first, second = model.layers
    assert (first.forward_s, first.backward_s, second.forward_s, second.backward_s) == (1e-3, 3e-3, 2e-3, 4e-3)
    assert first.outputs[0].output_bytes == 0.5 * 2**31
    assert first.outputs[0].gradient_bytes == 0.25 * 2**31
    assert first.buffer_bytes == 10
    plan = solve(model, flat_cluster(2, BYTES_PER_S), cost_model="max-load")
    assert plan.predicted.seconds_per_minibatch == pytest.approx(6.75e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": [{"sourceId": 0, "destId": 9, "cost": 1.0}]}, "unknown node 9"),
        ({"edges": [{"sourceId": 0, "destId": 3, "cost": 1.0}]}, "joins a forward and a backward node"),
        ({"edges": [{"sourceId": 2, "destId": 3, "cost": 1.0}]}, "where no activation does"),
        ({"nodes": [{"id": 0}]}, "missing"),
    ],
)
def test_bad_workloads_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(workload(**changes)))
    with pytest.raises(ProfileError, match=message):
        read_profile(file)


CHAIN = profile(*(layer(name, output_bytes=4, weight_bytes=100) for name in "abcd"))


def test_solvers_agree_and_say_who_they_are() -> None:
    plans = [solve(CHAIN, flat_cluster(2, 10.0, 900), solver=name) for name in ("search", "ilp", "brute")]
    assert len({plan.config for plan in plans}) == 1
    assert plans[0].solver.name == "search"
    assert plans[1].solver.name.startswith("ilp, ")
    assert plans[2].solver.name == "brute"
    assert all(plan.solver.status == "optimal" for plan in plans)


def test_constraints_are_kept_by_every_solver() -> None:
    apart = solve(CHAIN, flat_cluster(2, 1e9))
    assert apart.stages[0].layers == ("a", "b", "c", "d") or len(apart.stages) > 1
    for name in ("search", "ilp", "brute"):
        together = Constraints(together=(("b", "d"),))
        plan = solve(CHAIN, flat_cluster(2, 1e9, 1300), solver=name, constraints=together)
        home = {each: n for n, stage in enumerate(plan.stages) for each in stage.layers}
        assert home["b"] == home["c"] == home["d"]
        assert plan.profile_digest == CHAIN.digest
    pinned = solve(CHAIN, flat_cluster(3, 1e9), constraints=Constraints(stage_of={"c": 2}))
    assert "c" in pinned.stages[2].layers
    assert pinned.solver.name.startswith("ilp")
    with pytest.raises(InputError, match="the search does not take layers pinned"):
        solve(CHAIN, flat_cluster(3, 1e9), solver="search", constraints=Constraints(stage_of={"c": 2}))
    with pytest.raises(InputError, match="`solver=brute` does not take layers pinned"):
        solve(CHAIN, flat_cluster(3, 1e9), solver="brute", constraints=Constraints(stage_of={"c": 2}))


def test_constraints_or_memory_that_no_plan_meets_are_told_apart() -> None:
    with pytest.raises(InfeasibleError, match="respects the constraints"):
        solve(CHAIN, flat_cluster(3, 1e9), constraints=Constraints(stage_of={"a": 1}))
    with pytest.raises(InfeasibleError, match="no plan fits 3 GPUs") as caught:
        solve(CHAIN, flat_cluster(3, 1e9, 300), constraints=Constraints(stage_of={"b": 1}))
    assert "`memory_bytes=" in caught.value.hint
    level = Level(size=2, bandwidth_bytes_per_s=1e9)
    mixed = Cluster(levels=(level,), memory_bytes=100, kinds=(Kind(count=1), Kind(count=1, speed=2.0)))
    with pytest.raises(InfeasibleError, match="no plan fits the memory of the cluster's GPUs"):
        solve(CHAIN, mixed)


def test_a_placement_that_is_not_contiguous_is_marked() -> None:
    plan = solve(CHAIN, flat_cluster(2, 1e9), cost_model="max-load", constraints=Constraints(contiguous=False))
    assert not plan.contiguous
    assert plan.predicted.seconds_per_minibatch == pytest.approx(6.0)


def test_time_limits_of_the_search_leave_a_plan_and_a_gap() -> None:
    layers = [layer(f"l{n}", 1 + n * 37 % 11, 2, output_bytes=1 + n * 29 % 7, weight_bytes=n) for n in range(60)]
    for schedule in ("1f1b", "gpipe"):
        microbatches = 4 if schedule == "gpipe" else 1
        hurried = solve(
            profile(*layers), flat_cluster(8, 5.0), schedule=schedule, microbatches=microbatches, time_limit_s=0.0
        )
        best = solve(profile(*layers), flat_cluster(8, 5.0), schedule=schedule, microbatches=microbatches)
        assert hurried.solver.lower_bound_s <= best.predicted.seconds_per_minibatch * (1 + 1e-9)
        assert hurried.solver.status == "feasible"
        assert hurried.solver.gap > 0
