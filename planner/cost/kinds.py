"""Which kind of device each stage runs on, in a cluster of several kinds."""

from collections.abc import Collection, Sequence

from planner.cost.candidate import Candidate, StageOptions
from planner.cost.layer_costs import LayerCosts
from planner.cost.network.topology import ranks_of
from planner.cost.setting import Setting
from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.files import replace


def with_kinds(
    layer_costs: LayerCosts, stages: Sequence[Candidate], setting: Setting
) -> tuple[Candidate, ...]:
    """Return the stages with ranks, and the kinds of these; as they are where the cluster has no
    kinds.
    """
    cluster = setting.cluster
    if not cluster.kinds:
        return tuple(stages)
    ranks = ranks_of(stages, setting.workers_of(len(stages)))
    return tuple(
        replace(
            stage,
            ranks=tuple(own),
            options=replace(stage.options, kind=kind_on(layer_costs, cluster, stage, own)),
        )
        for stage, own in zip(stages, ranks, strict=True)
    )


def kind_on(
    layer_costs: LayerCosts, cluster: Cluster, stage: Candidate, ranks: Collection[int]
) -> DeviceKind:
    """Return the slowest kind of these ranks, which a stage's replicas wait for, with the memory of
    the smallest.
    """
    used = [
        kind
        for kind, own in zip(cluster.kinds, cluster.kind_ranks, strict=True)
        if any(rank in own for rank in ranks)
    ]
    slowest = max(used, key=lambda kind: _compute_s(layer_costs, stage, kind))
    limits = [limit for kind in used if (limit := cluster.memory_of(kind)) is not None]
    if len(used) == 1:
        return slowest
    return replace(slowest, memory_bytes=min(limits, default=None))


def fastest_rank(layer_costs: LayerCosts, cluster: Cluster) -> int:
    """Return the first rank of the fastest kind of devices."""
    if not cluster.kinds:
        return 0
    everything = layer_costs.single_stage
    seconds = [_compute_s(layer_costs, everything, kind) for kind in cluster.kinds]
    return cluster.kind_ranks[seconds.index(min(seconds))].start


def fastest_ranks(layer_costs: LayerCosts, cluster: Cluster, count: int) -> list[int]:
    """Return so many ranks in ascending order, those of the fastest kinds of devices."""
    if not cluster.kinds:
        return list(range(count))

    everything = layer_costs.single_stage
    seconds = [_compute_s(layer_costs, everything, kind) for kind in cluster.kinds]
    by_speed = sorted(range(len(seconds)), key=seconds.__getitem__)

    ranks: list[int] = []
    for number in by_speed:
        ranks += cluster.kind_ranks[number]
    return sorted(ranks[:count])


def everything_on(layer_costs: LayerCosts, cluster: Cluster, ranks: Sequence[int]) -> Candidate:
    """Return a single stage of all layers, with these ranks as replicas."""
    single = layer_costs.single_stage
    kind = None
    if cluster.kinds:
        kind = kind_on(layer_costs, cluster, single, ranks)
    return replace(
        single,
        options=StageOptions(len(ranks), kind=kind),
        ranks=tuple(ranks) if cluster.kinds else (),
    )


def _compute_s(layer_costs: LayerCosts, stage: Candidate, kind: DeviceKind) -> float:
    return float(layer_costs.work(replace(stage, options=StageOptions(kind=kind))).compute_s)
