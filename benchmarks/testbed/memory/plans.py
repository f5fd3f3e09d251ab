"""Make plans of given shapes that no solver would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost.candidate import StageOptions, candidates, whole_stage
from planner.cost.layer_costs import LayerCosts
from planner.cost.price_with_copies import price_with_copies
from planner.cost.setting import Setting
from planner.formats.cluster import flat_cluster
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.schedule.registry import find
from planner.solver.assemble import assemble
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.problem.states import uncut_groups


@dataclass(frozen=True)
class Shape:
    """Shape of a plan, for any model."""

    replicas: tuple[int, ...]
    schedule: str = "1f1b"
    microbatches: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        parts = ["-".join(map(str, self.replicas)), self.schedule]
        parts += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        return " ".join(parts + ["recomputing"] * self.recompute)


def shaped_plan(profile: Profile, shape: Shape) -> Plan:
    """Return a plan whose stages' times are about in proportion to their replicas."""
    layer_costs = LayerCosts(profile)
    groups = uncut_groups(layer_costs)
    layers = profile.layers
    seconds = [
        sum(layers[i].forward_s + layers[i].backward_s + layers[i].update_s for i in group)
        for group in groups
    ]
    parts = [
        [layer for group in groups[start:end] for layer in group]
        for start, end in cut_by_time(seconds, shape.replicas)
    ]
    stages = [
        replace(
            stage,
            options=StageOptions(
                stage.replicas, recompute=whole_stage(stage.layers, shape.recompute)
            ),
        )
        for stage in candidates(parts, shape.replicas)
    ]
    cluster = flat_cluster(sum(shape.replicas), 1e9)
    problem = Problem(layer_costs, Setting(cluster, find(shape.schedule), shape.microbatches))
    cost = price_with_copies(layer_costs, stages, problem.price(stages), problem.setting)
    return assemble(problem, Evaluation(tuple(stages), cost))


def cut_by_time(seconds: Sequence[float], replicas: Sequence[int]) -> list[tuple[int, int]]:
    """Return the groups of each stage; it ends where the time so far is nearest to its share, and
    none is empty.
    """
    ends: list[int] = []
    due_s = 0.0
    for stage, r in enumerate(replicas[:-1]):
        due_s += sum(seconds) * r / sum(replicas)
        first, last = (ends[-1] if ends else 0) + 1, len(seconds) - (len(replicas) - 1 - stage)
        ends.append(min(range(first, last + 1), key=lambda end: abs(sum(seconds[:end]) - due_s)))
    ends.append(len(seconds))
    return list(zip([0, *ends[:-1]], ends, strict=True))
