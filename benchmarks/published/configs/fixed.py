"""Find the best cuts for given replicas per stage, to price a published configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel
from planner.cost.network.link import link_of
from planner.cost.overheads import Price
from planner.cost.pricing import price
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster
from planner.solver.evaluate.evaluation import simulated
from planner.solver.problem.budget import Budget
from planner.solver.problem.problem import Problem
from planner.solver.problem.result import Evaluation
from planner.solver.problem.states import Chain


@dataclass(frozen=True)
class Fixed:
    """A configuration with its best cuts.

    Attributes:
        layers: of each stage.
        seconds: per minibatch.
        sent_bytes: by all workers per minibatch.
        memory_bytes: of the fullest device.
        busiest: stage and resource that set the pace.
    """

    layers: tuple[int, ...]
    seconds: float
    sent_bytes: float
    memory_bytes: int
    busiest: str


def best_cuts(layer_costs: LayerCosts, cluster: Cluster, replicas: Sequence[int]) -> Fixed | None:
    """Return the cheapest cuts found for these replicas per stage; None where the model has too few
    layers.

    A dynamic programme with the slowest link gives the first cuts. Each is then moved while that
    lowers the true price.
    """
    space = Chain(layer_costs)
    last = len(space) - 1
    if len(replicas) > last:
        return None
    flat = AsynchronousModel(link_of(cluster))
    worst = np.full((len(replicas) + 1, last + 1), np.inf)
    worst[0, 0] = 0.0
    came = np.zeros((len(replicas) + 1, last + 1), dtype=np.int64)
    for i in range(last):
        after = np.arange(i + 1, last + 1)
        work = space.work(i, after)
        for k, r in enumerate(replicas):
            if np.isfinite(worst[k, i]):
                total = np.maximum(worst[k, i], flat.stage_s(work, np.float64(r)))
                better = total < worst[k + 1, after]
                came[k + 1, after[better]] = i
                worst[k + 1, after[better]] = total[better]
    cuts = [last]
    for k in range(len(replicas), 0, -1):
        cuts.append(int(came[k, cuts[-1]]))
    return _moved(layer_costs, space, cluster, cuts[::-1], replicas)


def _moved(
    layer_costs: LayerCosts,
    space: Chain,
    cluster: Cluster,
    cuts: list[int],
    replicas: Sequence[int],
) -> Fixed:
    best = _price(layer_costs, space, cluster, cuts, replicas)
    improved = True
    while improved:
        improved = False
        for k in range(1, len(cuts) - 1):
            for place in range(max(cuts[k - 1] + 1, cuts[k] - 6), min(cuts[k + 1], cuts[k] + 7)):
                trial = [*cuts[:k], place, *cuts[k + 1 :]]
                found = _price(layer_costs, space, cluster, trial, replicas)
                if found.seconds_per_minibatch < best.seconds_per_minibatch * (1 - 1e-9):
                    cuts, best, improved = trial, found, True
    stages = _stages(space, cuts, replicas)
    problem = Problem(layer_costs, Setting(cluster), budget=Budget.unlimited())
    best = simulated(problem, Evaluation(tuple(stages), best)).price
    bottleneck = best.bottleneck
    return Fixed(
        tuple(len(stage.layers) for stage in stages),
        best.seconds_per_minibatch,
        best.communication_bytes,
        max(memory.total_bytes for memory in best.memory),
        f"{bottleneck.resource} of stage {bottleneck.stage}",
    )


def _price(
    layer_costs: LayerCosts,
    space: Chain,
    cluster: Cluster,
    cuts: Sequence[int],
    replicas: Sequence[int],
) -> Price:
    return price(layer_costs, _stages(space, cuts, replicas), Setting(cluster))


def _stages(space: Chain, cuts: Sequence[int], replicas: Sequence[int]) -> list[Candidate]:
    return [
        Candidate(frozenset(space.layers(0, i)), frozenset(space.layers(i, j)), StageOptions(r))
        for i, j, r in zip(cuts, cuts[1:], replicas, strict=False)
    ]
