"""Fewer kinds of devices than a run measured: the search tries the orders of a few."""

from itertools import combinations

from planner.formats.cluster import Cluster, DeviceKind
from planner.formats.files import replace


def with_few_kinds(cluster: Cluster, most: int) -> Cluster:
    """Return the cluster with at most so many kinds of devices, wherever their ranks are. Kinds of
    one GPU whose speeds are nearest become one, as fast as their mean; other GPUs stay apart.
    """
    kinds = list(cluster.kinds)
    while True:
        different = list(dict.fromkeys(replace(kind, count=1) for kind in kinds))
        pairs = [
            (_difference(one, other), one, other)
            for one, other in combinations(different, 2)
            if _same_gpu(one, other)
        ]

        if len(different) <= most or not pairs:
            return replace(cluster, kinds=tuple(kinds))

        _, one, other = min(pairs, key=lambda pair: pair[0])
        speed = _mean_speed(kinds, one, other)
        kinds = [
            replace(kind, speed=speed) if replace(kind, count=1) in (one, other) else kind
            for kind in kinds
        ]


def _difference(one: DeviceKind, other: DeviceKind) -> float:
    return max(one.speed / other.speed, other.speed / one.speed)


def _same_gpu(one: DeviceKind, other: DeviceKind) -> bool:
    return replace(one, speed=1.0) == replace(other, speed=1.0)


def _mean_speed(kinds: list[DeviceKind], *alike: DeviceKind) -> float:
    own = [kind for kind in kinds if replace(kind, count=1) in alike]
    return sum(kind.count * kind.speed for kind in own) / sum(kind.count for kind in own)
