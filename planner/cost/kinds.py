"""Which kind of device each stage runs on, in a cluster of several kinds.

All replicas of a stage do the same share of the work and wait for each other, so a stage on devices of several kinds
takes as long as on the slowest of them, and must fit the smallest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.placement import ranks_of
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, DeviceKind


def with_kinds(layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting) -> tuple[Candidate, ...]:
    """Return the stages with the kinds of their ranks, which they get where they have none; as they are without kinds.

    What stages knew of the kinds of another cluster does not count.
    """
    cluster, schedule = setting.cluster, setting.schedule
    if not cluster.kinds:
        return tuple(stages)
    workers = max(1, len(stages) // setting.chunks)
    ranks = ranks_of(stages, [schedule.worker_of(stage, workers) for stage in range(len(stages))])
    return tuple(
        replace(stage, ranks=tuple(own), options=replace(stage.options, kind=kind_on(layer_costs, cluster, stage, own)))
        for stage, own in zip(stages, ranks, strict=True)
    )


def kind_on(layer_costs: LayerCosts, cluster: Cluster, stage: Candidate, ranks: Collection[int]) -> DeviceKind:
    """Return the kind that sets the pace of a stage on these ranks, with the memory of the smallest of them."""
    used = [
        kind for kind, own in zip(cluster.kinds, cluster.kind_ranks, strict=True) if any(rank in own for rank in ranks)
    ]
    slowest = max(used, key=lambda kind: _compute_s(layer_costs, stage, kind))
    limits = [limit for kind in used if (limit := cluster.memory_of(kind)) is not None]
    return slowest if len(used) == 1 else slowest.model_copy(update={"memory_bytes": min(limits, default=None)})


def fastest_rank(layer_costs: LayerCosts, cluster: Cluster) -> int:
    """Return the first rank with a device on which the whole model takes least."""
    if not cluster.kinds:
        return 0
    everything = layer_costs.single_stage
    seconds = [_compute_s(layer_costs, everything, kind) for kind in cluster.kinds]
    return cluster.kind_ranks[seconds.index(min(seconds))].start


def everything_on(layer_costs: LayerCosts, cluster: Cluster, ranks: Sequence[int]) -> Candidate:
    """Return all layers as one stage on these ranks."""
    single = layer_costs.single_stage
    kind = kind_on(layer_costs, cluster, single, ranks) if cluster.kinds else None
    return replace(single, options=StageOptions(len(ranks), kind=kind), ranks=tuple(ranks) if cluster.kinds else ())


def _compute_s(layer_costs: LayerCosts, stage: Candidate, kind: DeviceKind) -> float:
    plain = replace(stage, options=StageOptions(kind=kind))
    return float(layer_costs.work(plain).compute_s)
