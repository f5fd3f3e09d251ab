"""Links between devices: the time of messages and all-reduces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.work import Floats
from planner.formats.cluster import Cluster

# Parts in which the executor all-reduces a stage's gradients. All but the last can overlap with the backward.
BUCKETS = 6


@dataclass(frozen=True)
class Link:
    """A device's link: bandwidth per direction, both used at once."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    all_reduce_bandwidth_bytes_per_s: float | None = None  # where it differs
    overlap: bool = True  # transfers go on while the device computes
    coding_s_per_byte: float = 0.0  # that the device itself takes to code what it sends, and to decode what it receives

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth within an all-reduce."""
        return self.all_reduce_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s

    @property
    def alike(self) -> Link:
        """This link, written as all links are that take the same seconds."""
        return replace(self, all_reduce_bandwidth_bytes_per_s=self.ring_bytes_per_s)

    def handling_s(self, moved_bytes: ArrayLike) -> Floats:
        """Return the processor's seconds for messages of so many bytes, received and sent.

        It codes them. If they do not overlap it also moves them: both directions have the bandwidth at once, so a byte
        takes half of its time.
        """
        cost = self.coding_s_per_byte + (0.0 if self.overlap else 0.5 / self.bandwidth_bytes_per_s)
        return np.asarray(np.asarray(moved_bytes, dtype=np.float64) * cost)


def link_of(cluster: Cluster) -> Link:
    """Return the slowest link of the cluster, at which every transfer is priced where places do not matter."""
    reduces = [level.all_reduce_bandwidth_bytes_per_s for level in cluster.levels]
    return Link(
        cluster.slowest_bandwidth_bytes_per_s,
        max(level.latency_s for level in cluster.levels),
        min((bandwidth for bandwidth in reduces if bandwidth is not None), default=None),
        cluster.overlap,
        cluster.coding_s_per_byte,
    )


def ring_all_reduce_s(trainable_bytes: ArrayLike, replicas: ArrayLike, link: Link) -> Floats:
    """Return the seconds of a ring all-reduce; 0 without replicas or without gradients.

    Each worker sends and receives 2(r-1)/r of the bytes in 2(r-1) steps (Patarasuk & Yuan 2009, section 3).
    """
    size, r = np.asarray(trainable_bytes, dtype=np.float64), np.asarray(replicas, dtype=np.float64)
    steps = np.where(size > 0, 2 * (r - 1), 0.0)
    return np.asarray(steps / r * size / link.ring_bytes_per_s + steps * link.latency_s)


def backward_and_reduce_s(backward_s: ArrayLike, reduce_s: ArrayLike, link: Link) -> Floats:
    """Return the least seconds from the start of a backward to the end of its all-reduce in `BUCKETS` parts.

    The last part waits for the end of the backward. The others are taken to be ready from its start: when they really
    are depends on the stage's layers, which the simulation knows (`planner.cost.network.buckets`).
    """
    backward, reduce = np.asarray(backward_s, dtype=np.float64), np.asarray(reduce_s, dtype=np.float64)
    if not link.overlap:
        return np.asarray(backward + reduce)
    return np.maximum(backward + reduce / BUCKETS, reduce)
