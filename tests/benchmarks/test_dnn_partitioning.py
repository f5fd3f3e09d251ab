"""The max-load objective: against every plan there is, and the published optima of the
workloads.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.dnn_partitioning.downsets import enumerate_downsets, to_bits
from benchmarks.published.dnn_partitioning.objective import Host, LoadProblem
from benchmarks.published.dnn_partitioning.solve import solve_ilp, solve_loads
from benchmarks.published.dnn_partitioning.workload import BYTES_PER_S, load_workload
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.errors import InputError, ProfileError
from planner.formats.cluster import Cluster, DeviceKind, Level, flat_cluster
from planner.formats.profile import Profile
from planner.options.solving import StageRules
from planner.solver.clock import NO_LIMIT
from tests.examples import examples
from tests.samples import layer, profile
from tests.solver.brute import downsets, plans
from tests.solver.strategies import profiles

WORKLOADS = Path(__file__).resolve().parents[3] / "shared" / "anchors" / "dnn-partitioning"
HOST = Host(count=1, speed=0.1, memory_bytes=2**60)


def fastest(request: LoadProblem) -> float:
    best = math.inf
    plain = replace(request, rules=StageRules("never", "never"))
    for stages in plans(plain, request.cluster.gpus, in_order=False, most_replicas=1):
        held = [request.load(stage)[1] for stage in stages]
        limits = [request.cluster.memory_of(stage.options.kind) for stage in stages]
        if all(limit is None or size <= limit for size, limit in zip(held, limits, strict=True)):
            best = min(best, request.longest_s(stages))
    return best


@settings(max_examples=examples(200), deadline=None)
@given(model=profiles(most_layers=5))
def test_the_cuts_are_all_sets_of_layers_with_what_they_need(model: Profile) -> None:
    layer_costs = LayerCosts(model)
    words = enumerate_downsets(layer_costs, 1000)
    assert words is not None
    found = [frozenset(np.flatnonzero(row).tolist()) for row in to_bits(words, len(model.layers))]
    assert len(found) == len(set(found))
    assert set(found) == set(downsets(layer_costs, of_plans=False))
    assert all(not later < cut for number, cut in enumerate(found) for later in found[number:])
    assert enumerate_downsets(layer_costs, len(found) - 1) is None


@settings(max_examples=examples(200), deadline=None)
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
    model: Profile,
    gpus: int,
    bandwidth: float,
    latency: float,
    memory: int | None,
    host: bool,
    through_ilp: int,
) -> None:
    level = Level(size=gpus + host, bandwidth_bytes_per_s=bandwidth, latency_s=latency)
    kinds = (DeviceKind(count=gpus), HOST) if host else ()
    cluster = Cluster(levels=(level,), memory_bytes=memory, kinds=kinds)
    request = LoadProblem(LayerCosts(model), Setting(cluster))
    expected = fastest(request)
    for answer in (
        solve_loads(request, NO_LIMIT),
        solve_ilp(request, NO_LIMIT) if through_ilp == 0 else None,
    ):
        if answer is None:
            assert expected == math.inf or through_ilp
            continue
        assert answer.optimal
        assert answer.seconds == pytest.approx(expected, rel=1e-9)
        assert request.longest_s(answer.stages) == pytest.approx(expected, rel=1e-9)


# maxFPGAs devices of the file alone, and with its one CPU, ten times slower, which pays for no
# transfers.
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
    model = load_workload(WORKLOADS / f"{name}_training.json")
    assert model.device.memory_bytes is not None
    cluster = flat_cluster(6, BYTES_PER_S, model.device.memory_bytes)
    if host:
        level = Level(size=7, bandwidth_bytes_per_s=BYTES_PER_S)
        cluster = Cluster(
            levels=(level,),
            memory_bytes=model.device.memory_bytes,
            kinds=(DeviceKind(count=6), HOST),
        )
    request = LoadProblem(LayerCosts(model), Setting(cluster))
    answer = solve_loads(request, NO_LIMIT)
    assert answer is not None
    assert answer.seconds * 1e3 == pytest.approx(milliseconds, rel=6e-6)
    assert request.longest_s(answer.stages) == pytest.approx(answer.seconds, rel=1e-9)
    assert answer.optimal


def workload(**changes: object) -> dict[str, object]:
    """Two operations, forward and backward."""
    node = {"supportedOnFpga": 1, "cpuLatency": 1.0, "size": 5.0}
    nodes = [
        {
            "id": n,
            "name": f"n{n}",
            "fpgaLatency": 1.0 + n,
            "isBackwardNode": n // 2,
            "colorClass": n % 2,
            **node,
        }
        for n in range(4)
    ]
    edges = [{"sourceId": 0, "destId": 1, "cost": 0.5}, {"sourceId": 2, "destId": 3, "cost": 0.25}]
    return {
        "maxSizePerFPGA": 100.0,
        "maxFPGAs": 2,
        "maxCPUs": 0,
        "nodes": nodes,
        "edges": edges,
        **changes,
    }


def test_a_workload_becomes_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(workload()))
    model = load_workload(file)
    first, second = model.layers
    assert (first.forward_s, first.backward_s, second.forward_s, second.backward_s) == (
        1e-3,
        3e-3,
        2e-3,
        4e-3,
    )
    assert first.outputs[0].output_bytes == 0.5 * 2**31
    assert first.outputs[0].gradient_bytes == 0.25 * 2**31
    assert first.buffer_bytes == 10
    answer = solve_loads(
        LoadProblem(LayerCosts(model), Setting(flat_cluster(2, BYTES_PER_S))), NO_LIMIT
    )
    assert answer is not None
    assert answer.seconds == pytest.approx(6.75e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": [{"sourceId": 0, "destId": 9, "cost": 1.0}]}, "unknown node 9"),
        (
            {"edges": [{"sourceId": 0, "destId": 3, "cost": 1.0}]},
            "joins a forward and a backward node",
        ),
        ({"edges": [{"sourceId": 2, "destId": 3, "cost": 1.0}]}, "where no activation does"),
        ({"nodes": [{"id": 0}]}, "missing"),
    ],
)
def test_bad_workloads_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(workload(**changes)))
    with pytest.raises(ProfileError, match=message):
        load_workload(file)


def test_clusters_of_several_levels_are_refused() -> None:
    levels = (Level(size=2, bandwidth_bytes_per_s=2.0), Level(size=2, bandwidth_bytes_per_s=1.0))
    with pytest.raises(InputError, match="clusters of one level"):
        LoadProblem(LayerCosts(profile(layer("a"))), Setting(Cluster(levels=levels)))
