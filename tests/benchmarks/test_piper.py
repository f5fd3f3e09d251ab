"""The formulas of Piper's program say of its plans what it printed."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu_truth.rows import ANCHORS, anchors
from benchmarks.solver_quality.piper.formulas import Formulas, PiperStage
from benchmarks.solver_quality.piper.graphs import load_piper
from benchmarks.solver_quality.piper.question import answered
from planner.cost.setting import Setting
from planner.cost.tensor import layer_costs_on
from planner.formats.cluster import flat_cluster
from planner.options.solving import StageRules
from planner.schedule.one_stage import TWO_BW
from planner.solver.problem.problem import Problem


@pytest.mark.skipif(not ANCHORS.exists(), reason="the published answers are not here")
def test_formulas_say_what_the_program_printed() -> None:
    checked = 0
    for run in anchors("piper.json")["runs"]:
        if not run["feasible"] or run["input"] != "bert32a100":
            continue
        graph = json.loads(
            (ANCHORS / "piper-inputs" / f"{run['input']}.json").read_text(encoding="utf-8")
        )
        stages = [
            PiperStage(
                frozenset(each["nodes"]), each["dp"], each["tp"], frozenset(each["recomputed"])
            )
            for each in run["stages"]
        ]
        formulas = Formulas(graph, run["bandwidth"], run["microbatches"])
        assert formulas.seconds(stages) == pytest.approx(run["tps"], rel=1e-5)
        assert formulas.memory_bytes(stages) <= run["memory_bytes"]
        checked += 1
    assert checked == 25


MICROBATCHES = 12


def random_graph(rng: np.random.Generator) -> dict[str, Any]:
    """Four nodes on one or two ranks, which save less where they recompute."""
    pairs = [pair for pair in combinations(range(4), 2) if rng.random() < 0.5] or [(0, 3)]

    def costs(name: str, node: int, less: int, again: bool) -> dict[str, Any]:
        fixed, saved = 20 * (node + 1) // less, int(rng.integers(8, 20))
        return {
            "id": name,
            "timePerSample": float(rng.integers(4, 9) + again * rng.integers(1, 4)) / less,
            "parameterSize": float(fixed),
            "memoryUsageA": float(2 if again else saved),
            "memoryUsageB": float(2 * fixed + again * rng.integers(4, 9)),
            "syncTimeFw": {str(a): float(rng.integers(0, 3)) for a, b in pairs if b == node},
            "syncTimeBw": {str(b): float(rng.integers(0, 3)) for a, b in pairs if a == node},
        }

    def both(node: int, degree: int) -> list[dict[str, Any]]:
        plain = costs("vanilla", node, degree, again=False)
        again = costs("activation recomp", node, degree, again=True)
        again["timePerSample"] = plain["timePerSample"] + float(rng.integers(1, 4))
        return [
            plain,
            again | {"syncTimeFw": plain["syncTimeFw"], "syncTimeBw": plain["syncTimeBw"]},
        ]

    return {
        "maxMemoryPerDevice": 1000.0,
        "maxDevices": 3,
        "mbsInBatch": MICROBATCHES,
        "nodes": [
            {"id": n, "name": "", "TMPCs": {str(t): both(n, t) for t in (1, 2)}} for n in range(4)
        ],
        "edges": [
            {"sourceId": a, "destId": b, "communicationCost": float(rng.integers(1, 30))}
            for a, b in pairs
        ],
    }


def fastest_s(order: list[int], gpus: int, memory_bytes: int, formulas: Formulas) -> float:
    """Try every plan of one degree whose stages are consecutive nodes of the order, from the last
    to the first.
    """

    @cache
    def least(end: int, degree: int, behind: tuple[PiperStage, ...]) -> float:
        if not end:
            return formulas.seconds(behind)
        room, best = gpus - sum(stage.replicas * stage.tensor for stage in behind), math.inf
        for start in range(end):
            nodes = frozenset(order[start:end])
            for again in map(
                frozenset, chain(*(combinations(nodes, n) for n in range(len(nodes) + 1)))
            ):
                for replicas in range(1, room // degree + 1):
                    stages = (PiperStage(nodes, replicas, degree, again), *behind)
                    if formulas.memory_bytes(stages) <= memory_bytes:
                        best = min(best, least(start, degree, stages))
        return best

    return min(least(len(order), degree, ()) for degree in (1, 2))


def test_the_question_of_the_program_is_answered_as_by_every_plan(tmp_path: Path) -> None:
    path, possible = tmp_path / "graph.json", 0
    for seed in range(6):
        rng = np.random.default_rng([21, seed])
        content, memory_bytes = random_graph(rng), int(rng.integers(120, 260))
        path.write_text(json.dumps(content))
        cluster = flat_cluster(3, 100.0 / 2, memory_bytes, overlap=False)
        rules = StageRules(shard_optimizer="never", tensor=(1, 2))
        graph = load_piper(path)
        problem = Problem(
            layer_costs_on(graph, cluster), Setting(cluster, TWO_BW, MICROBATCHES), rules
        )
        formulas = Formulas(content, 100.0, MICROBATCHES)
        order = [int(layer.name) for layer in graph.layers]
        expected, stages = fastest_s(order, 3, memory_bytes, formulas), answered(problem, content)
        assert (stages is None) == math.isinf(expected), seed
        if stages is not None:
            possible += 1
            assert formulas.seconds(stages) == pytest.approx(expected, rel=1e-9), seed
            assert formulas.memory_bytes(stages) <= memory_bytes, seed
    assert possible > 2
