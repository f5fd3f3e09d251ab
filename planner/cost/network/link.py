"""Links between devices: the time of messages and all-reduces, and the buckets of gradients that
are all-reduced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.work import Floats
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.profile import Layer
from planner.units import SLACK

# Parts in which the executor all-reduces a stage's gradients. All but the last can overlap with the
# backward.
BUCKETS = 6


@dataclass(frozen=True)
class Link:
    """A device's link: bandwidth per direction, both used at once."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    all_reduce_bandwidth_bytes_per_s: float | None = None  # where it differs
    overlap: bool = True  # transfers go on while the device computes
    # that the device itself takes to code what it sends, and to decode what it receives
    coding_s_per_byte: float = 0.0
    # of what ranks compute between all-reduces: they wait so long for the slowest of them
    wait_share: float = 0.0
    most_wait_s: float = 0.0  # for one all-reduce

    @property
    def ring_bytes_per_s(self) -> float:
        return self.all_reduce_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s

    def slowed(self, times: float) -> "Link":
        """Return the link, so many times slower: messages and all-reduces alike."""
        reduces = self.all_reduce_bandwidth_bytes_per_s
        if reduces is not None:
            reduces /= times
        return replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / times,
            all_reduce_bandwidth_bytes_per_s=reduces,
        )

    def handling_s(self, moved_bytes: ArrayLike) -> Floats:
        """Return the processor's seconds for messages of so many bytes, received and sent."""
        # It codes them. If they do not overlap it also moves them: both directions have the
        # bandwidth at once.
        s_per_byte = self.coding_s_per_byte
        if not self.overlap:
            s_per_byte += 0.5 / self.bandwidth_bytes_per_s
        return np.asarray(np.asarray(moved_bytes, dtype=np.float64) * s_per_byte)


def link_of(cluster: Cluster) -> Link:
    """Return the slowest link of the cluster, at which every transfer is priced where places do not
    matter.
    """
    return Link(
        cluster.slowest_bandwidth_bytes_per_s,
        max(level.latency_s for level in cluster.levels),
        cluster.slowest_ring_bytes_per_s,
        cluster.overlap,
        cluster.coding_s_per_byte,
    )


def ring_all_reduce_s(trainable_bytes: ArrayLike, replicas: ArrayLike, link: Link) -> Floats:
    """Return the seconds of a ring all-reduce: 2(r-1) steps, 2(r-1)/r of the bytes (Patarasuk &
    Yuan 2009).
    """
    size = np.asarray(trainable_bytes, dtype=np.float64)
    r = np.asarray(replicas, dtype=np.float64)
    steps = np.where(size > 0, 2 * (r - 1), 0.0)
    return np.asarray(steps / r * size / link.ring_bytes_per_s + steps * link.latency_s)


def backward_and_reduce_s(backward_s: ArrayLike, reduce_s: ArrayLike, link: Link) -> Floats:
    """Return the least seconds of a backward with its all-reduce, of whose `BUCKETS` parts only the
    last must wait.
    """
    backward = np.asarray(backward_s, dtype=np.float64)
    reduce = np.asarray(reduce_s, dtype=np.float64)
    if not link.overlap:
        return np.asarray(backward + reduce)
    return np.maximum(backward + reduce / BUCKETS, reduce)


# Smaller buckets would be dominated by latency. The largest are as large as
# DistributedDataParallel's.
LEAST_BUCKET_BYTES = 10**6
MOST_BUCKET_BYTES = 25 * 10**6

MOST_PARTS = 8  # buckets of a stage that a simulation tells apart


def bucket_bytes(total_bytes: int) -> int:
    """Return the bytes at which a bucket is full; it may have more, because a gradient is never
    divided.
    """
    return min(max(total_bytes // BUCKETS, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)


class Buckets(NamedTuple):
    """The buckets of a stage's gradients, in the order in which a backward fills them."""

    # from the start of the backward until each is full; the last one is its end
    ready_s: tuple[float, ...]
    # of the gradients' bytes in each; 0 in the last one if the others have all of them
    shares: tuple[float, ...]

    @classmethod
    def even(cls, backward_s: float) -> "Buckets":
        """Return buckets of equal size, full at equal distances."""
        return cls(
            tuple(backward_s * (part + 1) / BUCKETS for part in range(BUCKETS)),
            (1 / BUCKETS,) * BUCKETS,
        )

    def reduced_s(self, reduce_s: float) -> float:
        """Return the seconds from the start of the backward to the end of the all-reduce, which
        takes `reduce_s`.
        """
        clock_s = 0.0
        for at_s, share in zip(self.ready_s, self.shares, strict=True):
            clock_s = max(clock_s, at_s) + reduce_s * share
        return clock_s


def buckets_of(
    layers: Sequence[Layer],
    copied: Sequence[Layer] = (),
    again_s: Mapping[int, float] | None = None,
) -> Buckets:
    """Return the buckets that the executor fills in a backward of these layers, and of weights
    copied from others.

    `again_s`: of forwards that run again within the backward, by the number of the layer before
        whose backward.
    """
    again_s = again_s or {}
    backward_s = sum(layer.backward_s for layer in layers) + sum(again_s.values())
    pieces = _pieces(layers, copied, again_s)
    total_bytes = sum(size for size, _ in pieces)
    if total_bytes <= 0:
        return Buckets.even(backward_s)

    filled = _filled(pieces, bucket_bytes(round(total_bytes)))
    if len(filled) > MOST_PARTS:
        # Simulations count each of them. The first decides when an all-reduce begins, the last one
        # how much of it is left after the backward.
        groups = MOST_PARTS - 2
        ends = [(len(filled) - 2) * (group + 1) // groups for group in range(groups)]
        filled = [filled[0], *(filled[end] for end in ends), filled[-1]]

    done_bytes, last_s = filled[-1]
    if last_s < backward_s * (1 - SLACK):
        filled.append((done_bytes, backward_s))

    done = [0.0, *(end / total_bytes for end, _ in filled)]
    times = (*(at_s for _, at_s in filled[:-1]), backward_s)
    return Buckets(times, tuple(end - start for start, end in pairwise(done)))


def _pieces(
    layers: Sequence[Layer], copied: Sequence[Layer], again_s: Mapping[int, float]
) -> list[tuple[float, float]]:
    """Return the bytes of gradients, and when they exist, in the order of a backward."""
    copied_bytes = _copied_bytes(layers, copied)
    pieces: list[tuple[float, float]] = []
    clock_s = 0.0
    for number in reversed(range(len(layers))):
        layer = layers[number]
        clock_s += again_s.get(number, 0.0)
        # A layer is taken to finish its parameters in pairs, a weight with its bias, at equal
        # distances.
        count = max(1, len(layer.parameters) // 2)
        size = (layer.gradient_bytes + copied_bytes[number]) / count
        if size > 0:
            pieces += [(size, clock_s + layer.backward_s * (n + 1) / count) for n in range(count)]
        clock_s += layer.backward_s

    return pieces


def _copied_bytes(layers: Sequence[Layer], copied: Sequence[Layer]) -> list[int]:
    """Return the gradients of duplicated weights by the layer after whose backward they are
    complete: the first that uses them.
    """
    sizes = [0] * len(layers)
    for other in copied:
        names = set(other.parameters)
        users = [
            number for number, layer in enumerate(layers) if names.intersection(layer.parameters)
        ]
        sizes[users[0] if users else 0] += other.gradient_bytes
    return sizes


def _filled(pieces: Sequence[tuple[float, float]], full_bytes: int) -> list[tuple[float, float]]:
    """Fill buckets, and return for each the bytes up to its end, and when it is full."""
    filled: list[tuple[float, float]] = []
    size_bytes = 0.0
    done_bytes = 0.0
    for piece_bytes, at_s in pieces:
        if not filled or size_bytes >= full_bytes:
            filled.append((0.0, 0.0))
            size_bytes = 0.0
        size_bytes += piece_bytes
        done_bytes += piece_bytes
        filled[-1] = (done_bytes, at_s)

    return filled
