"""What Piper's program says of a plan for one of its graphs: `algo.cpp`, lines 1100 to 1200, as
formulas.

seconds per microbatch = max over stages of (compute + 2 * bytes of crossing edges / B) * ceil(m /
                                            d) / m + 4 (d - 1) W / (d m B)
memory of a stage      = sum of A * ceil(d of this and all later stages / d) + B
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.solver_quality.piper.graphs import RECOMPUTING


@dataclass(frozen=True)
class PiperStage:
    """Nodes on `replicas` groups of `tensor` devices; some of them recompute."""

    nodes: frozenset[int]
    replicas: int
    tensor: int
    recomputed: frozenset[int]


@dataclass(frozen=True)
class Formulas:
    """The program's view of a graph on devices with links of one bandwidth.

    Attributes:
        graph: the input file's content.
        bandwidth_bytes_per_s: of the links.
        microbatches: of a batch, after which gradients are exchanged.
    """

    graph: Mapping[str, Any]
    bandwidth_bytes_per_s: float
    microbatches: int

    def seconds(self, stages: Sequence[PiperStage]) -> float:
        """Return the seconds per microbatch."""
        return max(self._stage_s(stage) for stage in stages)

    def memory_bytes(self, stages: Sequence[PiperStage]) -> float:
        """Return the bytes of the device that holds most."""
        held, suffix = 0.0, 0
        for stage in reversed(stages):
            suffix += stage.replicas
            flying = -(-suffix // stage.replicas)
            costs = self._costs(stage)
            held = max(
                held,
                sum(
                    each["memoryUsageA"] * flying + each["memoryUsageB"] for each in costs.values()
                ),
            )
        return held

    def _stage_s(self, stage: PiperStage) -> float:
        costs, d = self._costs(stage), stage.replicas
        # of the microbatches that the busiest replica has
        share = -(-self.microbatches // d) / self.microbatches
        moved = 0.0
        for edge in self.graph["edges"]:
            source, target = edge["sourceId"], edge["destId"]
            if target in stage.nodes and source not in stage.nodes:
                moved += 2 * (edge["communicationCost"] + costs[target]["syncTimeFw"][str(source)])
            if source in stage.nodes and target not in stage.nodes:
                moved += 2 * (edge["communicationCost"] + costs[source]["syncTimeBw"][str(target)])
        weights = sum(each["parameterSize"] for each in costs.values())
        compute_s = sum(each["timePerSample"] for each in costs.values())
        reduced = 4 * (d - 1) * weights / d / self.microbatches
        return float((moved * share + reduced) / self.bandwidth_bytes_per_s + compute_s * share)

    def _costs(self, stage: PiperStage) -> dict[int, Mapping[str, Any]]:
        found: dict[int, Mapping[str, Any]] = {}
        for node in self.graph["nodes"]:
            if node["id"] in stage.nodes:
                found[node["id"]] = costs_of(node, stage.tensor, node["id"] in stage.recomputed)
        return found


def costs_of(node: Mapping[str, Any], degree: int, again: bool) -> Mapping[str, Any]:
    """Return what a node of the file costs at a degree, recomputing or not."""
    ways: Sequence[Mapping[str, Any]] = node["TMPCs"][str(degree)]
    return next((each for each in ways if (each["id"] == RECOMPUTING) == again), ways[0])
