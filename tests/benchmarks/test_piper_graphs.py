"""Piper's graphs as profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.solver_quality.piper.graphs import load_piper
from planner.errors import ProfileError
from planner.formats.cluster import flat_cluster
from planner.solver import search_plan as solve

INPUTS = Path(__file__).resolve().parents[3] / "shared" / "anchors" / "gpu" / "piper-inputs"


def ways(seconds: float, degree: int) -> list[dict[str, Any]]:
    costs = {"parameterSize": 80.0 / degree, "memoryUsageA": 30.0, "memoryUsageB": 160.0 / degree}
    sync: dict[str, Any] = {"syncTimeFw": {}, "syncTimeBw": {}}
    return [
        {"id": "vanilla", "timePerSample": seconds / degree, **costs, **sync},
        {"id": "activation recomp", "timePerSample": 1.25 * seconds / degree, **costs, **sync},
    ]


def graph() -> dict[str, Any]:
    nodes = [
        {"id": n, "name": "layer", "TMPCs": {str(t): ways(4.0, t) for t in (1, 2)}}
        for n in (3, 1, 2)
    ]
    edges = [
        {"sourceId": a, "destId": b, "communicationCost": size}
        for a, b, size in ((1, 2, 5.0), (2, 3, 7.0))
    ]
    return {
        "maxMemoryPerDevice": 1000.0,
        "maxDevices": 4,
        "bandwidth": 100.0,
        "mbsInBatch": 8,
        "nodes": nodes,
        "edges": edges,
    }


def test_a_graph_is_a_profile_with_degrees(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph()))
    profile = load_piper(path)
    assert [layer.name for layer in profile.layers] == ["1", "2", "3"]
    assert [(layer.forward_s, layer.backward_s) for layer in profile.layers] == [(1.0, 3.0)] * 3
    assert [(layer.gradient_bytes, layer.buffer_bytes) for layer in profile.layers] == [
        (80, 80)
    ] * 3
    assert [value.output_bytes for layer in profile.layers for value in layer.outputs] == [5, 7]
    assert profile.tensor is not None
    assert [(costs.degree, costs.backward_s, costs.gradient_bytes) for costs in profile.tensor] == [
        (2, (1.5,) * 3, (40,) * 3)
    ]
    plan = solve(profile, flat_cluster(4, 1e6), schedule="2bw", microbatches=8, tensor=(1, 2))
    assert plan.predicted.seconds_per_minibatch == pytest.approx(8 * 3 * 4.0 / 4, rel=1e-3)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    path, wrong = tmp_path / "graph.json", graph()
    wrong["nodes"][0]["TMPCs"]["1"][0]["timePerSample"] = -1.0
    path.write_text(json.dumps(wrong))
    with pytest.raises(ProfileError, match="timePerSample"):
        load_piper(path)
    path.write_text(
        json.dumps(graph() | {"edges": [{"sourceId": 1, "destId": 9, "communicationCost": 1.0}]})
    )
    with pytest.raises(ProfileError, match="unknown node 9"):
        load_piper(path)


@pytest.mark.parametrize(
    ("name", "layers", "degrees"), [("bert32a100", 37, [2, 4, 8]), ("gnmt", 78, [])]
)
def test_published_graphs_are_read(name: str, layers: int, degrees: list[int]) -> None:
    if not INPUTS.exists():
        pytest.skip("the published graphs are not here")
    profile = load_piper(INPUTS / f"{name}.json")
    assert len(profile.layers) == layers
    assert [costs.degree for costs in profile.tensor or ()] == degrees
