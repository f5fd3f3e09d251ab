"""Plans with given stages: one layer each, nothing solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.candidate import StageOptions, candidates, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Layer
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from tests.samples import layer, profile


def equal_layers(
    count: int, output_bytes: int = 1, weight_bytes: int = 0, saved_bytes: int = 0
) -> list[Layer]:
    """Layers of 1 s forward and 2 s backward."""
    return [
        layer(
            f"l{i}", output_bytes=output_bytes, weight_bytes=weight_bytes, saved_bytes=saved_bytes
        )
        for i in range(count)
    ]


def plan_of(
    layers: Sequence[Layer],
    replicas: Sequence[int],
    cluster: Cluster | None = None,
    *,
    schedule: str = "1f1b",
    microbatches: int = 1,
    depths: Sequence[int] | None = None,
    recompute: bool = False,
    chunks: int = 1,
) -> Plan:
    """Stage s is layer s on `replicas[s]` workers; the links are fast where no cluster is given."""
    layer_costs = LayerCosts(profile(*layers))
    cluster = cluster or flat_cluster(sum(replicas) // chunks, 1e12)
    stages = [
        replace(
            stage,
            options=StageOptions(stage.replicas, recompute=whole_stage(stage.layers, recompute)),
        )
        for stage in candidates([[i] for i in range(len(layers))], replicas)
    ]
    problem = Problem(layer_costs, Setting(cluster, find(schedule), microbatches, chunks))
    cost = problem.price(stages)
    if depths is not None:
        assert schedule == "1f1b"
        weights = [
            each.weights_bytes // flying
            for each, flying in zip(cost.memory, cost.in_flight, strict=True)
        ]
        saved = [
            each.activations_bytes // flying
            for each, flying in zip(cost.memory, cost.in_flight, strict=True)
        ]
        memory = tuple(
            each.model_copy(update={"weights_bytes": w * depth, "activations_bytes": s * depth})
            for each, w, s, depth in zip(cost.memory, weights, saved, depths, strict=True)
        )
        cost = replace(cost, in_flight=tuple(depths), memory=memory)
    return assemble(problem, Evaluation(tuple(stages), cost))
