"""Links: what messages and all-reduces take on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.work import Floats
from planner.formats.cluster import Cluster

# Parts in which the executor all-reduces a stage's gradients: the more, the more overlaps with the backward.
BUCKETS = 6


@dataclass(frozen=True)
class Link:
    """What one device sends while it receives as much, by itself and in an all-reduce.

    `overlap`: whether it does so while it computes.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    all_reduce_bandwidth_bytes_per_s: float | None = None  # where it differs
    overlap: bool = True

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth within an all-reduce."""
        return self.all_reduce_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s

    def handling_s(self, moved_bytes: ArrayLike) -> Floats:
        """Seconds of the processor for messages of so many bytes, received and sent; none where they overlap.

        The bandwidth is of both directions at once, so a byte takes half of its time.
        """
        cost = 0.0 if self.overlap else 0.5 / self.bandwidth_bytes_per_s
        return np.asarray(np.asarray(moved_bytes, dtype=np.float64) * cost)


def link_of(cluster: Cluster) -> Link:
    """The slowest link of the cluster, which prices every transfer."""
    reduces = [level.all_reduce_bandwidth_bytes_per_s for level in cluster.levels]
    return Link(
        cluster.slowest_bandwidth_bytes_per_s,
        max(level.latency_s for level in cluster.levels),
        min((bandwidth for bandwidth in reduces if bandwidth is not None), default=None),
        cluster.overlap,
    )


def ring_all_reduce_s(trainable_bytes: ArrayLike, replicas: ArrayLike, link: Link) -> Floats:
    """Seconds for a ring all-reduce; nothing without replicas or without gradients.

    Each worker sends and receives 2(r-1)/r of the bytes in 2(r-1) steps (Patarasuk & Yuan 2009, section 3).
    """
    size, r = np.asarray(trainable_bytes, dtype=np.float64), np.asarray(replicas, dtype=np.float64)
    steps = np.where(size > 0, 2 * (r - 1), 0.0)
    return np.asarray(steps / r * size / link.ring_bytes_per_s + steps * link.latency_s)


def backward_and_reduce_s(backward_s: ArrayLike, reduce_s: ArrayLike, link: Link) -> Floats:
    """Seconds from the start of a backward to the end of its all-reduce, `BUCKETS` parts of which overlap, at least.

    The last part waits for the backward's end. The first one is there as soon as the last layer's gradients are, which
    a stage's times do not tell, but the simulation does (`planner.cost.buckets`): here, from the backward's start.
    """
    backward, reduce = np.asarray(backward_s, dtype=np.float64), np.asarray(reduce_s, dtype=np.float64)
    if not link.overlap:
        return np.asarray(backward + reduce)
    return np.maximum(backward + reduce / BUCKETS, reduce)
