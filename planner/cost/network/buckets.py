"""Buckets of a replicated stage's gradients: their size, and when in the backward they can be all-reduced.

The executor, which fills buckets, and the simulation, which only knows layers, use the same rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.cost.network.link import BUCKETS
from planner.formats.profile import Layer
from planner.units import SLACK

# Smaller buckets would be dominated by latency. The largest are as large as DistributedDataParallel's.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 10**6, 25 * 10**6

MOST_PARTS = 8  # buckets of a stage that a simulation tells apart


def bucket_bytes(total_bytes: int) -> int:
    """Return the bytes at which a bucket is full; it may have more, because a gradient is never divided."""
    return min(max(total_bytes // BUCKETS, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)


class Buckets(NamedTuple):
    """The buckets of a stage's gradients, in the order in which a backward fills them."""

    ready_s: tuple[float, ...]  # from the start of the backward until each is full; the last one is its end
    shares: tuple[float, ...]  # of the gradients' bytes in each; 0 in the last one if the others have all of them

    @classmethod
    def even(cls, backward_s: float) -> Buckets:
        """Return equal buckets, evenly spaced over a backward."""
        return cls(tuple(backward_s * (part + 1) / BUCKETS for part in range(BUCKETS)), (1 / BUCKETS,) * BUCKETS)

    def reduced_s(self, reduce_s: float) -> float:
        """Return the seconds from the start of the backward to the end of the all-reduce, which takes `reduce_s`."""
        clock_s = 0.0
        for at_s, share in zip(self.ready_s, self.shares, strict=True):
            clock_s = max(clock_s, at_s) + reduce_s * share
        return clock_s


def buckets_of(
    layers: Sequence[Layer], copied: Sequence[Layer] = (), again_s: Mapping[int, float] | None = None
) -> Buckets:
    """Return the buckets that the executor fills in a backward of these layers.

    Args:
        layers: of the stage, in their order.
        copied: layers of other stages whose weights some of these layers use, too.
        again_s: of the forwards that run again within the backward, by the number of the layer before whose backward.

    A profile records the gradients of a layer as a whole. A layer of many parameters is taken to finish them in pairs,
    a weight with its bias, of equal size and at equal distances over its backward.
    """
    again_s = again_s or {}
    backward_s = sum(layer.backward_s for layer in layers) + sum(again_s.values())
    pieces = _pieces(layers, copied, again_s)
    total_bytes = sum(size for size, _ in pieces)
    if total_bytes <= 0:
        return Buckets.even(backward_s)
    full_bytes, filled = bucket_bytes(round(total_bytes)), list[tuple[float, float]]()  # bytes so far, time
    size_bytes, done_bytes = 0.0, 0.0
    for size, at_s in pieces:
        if not filled or size_bytes >= full_bytes:
            filled.append((0.0, 0.0))
            size_bytes = 0.0
        size_bytes, done_bytes = size_bytes + size, done_bytes + size
        filled[-1] = done_bytes, at_s
    if len(filled) > MOST_PARTS:
        # Simulations count each of them. The first decides when an all-reduce begins, the last one how much of it is
        # left after the backward.
        groups = MOST_PARTS - 2
        ends = [(len(filled) - 2) * (group + 1) // groups for group in range(groups)]
        filled = [filled[0], *(filled[end] for end in ends), filled[-1]]
    if filled[-1][1] < backward_s * (1 - SLACK):
        filled.append((done_bytes, backward_s))
    done = [0.0, *(end / total_bytes for end, _ in filled)]
    times = (*(at_s for _, at_s in filled[:-1]), backward_s)
    return Buckets(times, tuple(end - start for start, end in pairwise(done)))


def _pieces(
    layers: Sequence[Layer], copied: Sequence[Layer], again_s: Mapping[int, float]
) -> list[tuple[float, float]]:
    """Return the bytes of gradients and when in the backward they exist, from the last layer to the first."""
    # The gradient of a duplicated weight is complete after the backward of the first layer that uses it.
    extra_bytes = [0] * len(layers)
    for other in copied:
        names = set(other.parameters)
        users = [number for number, layer in enumerate(layers) if names.intersection(layer.parameters)]
        extra_bytes[users[0] if users else 0] += other.gradient_bytes
    pieces, clock_s = [], 0.0
    for number in reversed(range(len(layers))):
        layer, extra = layers[number], extra_bytes[number]
        clock_s += again_s.get(number, 0.0)
        count = max(1, len(layer.parameters) // 2)
        size = (layer.gradient_bytes + extra) / count
        if size > 0:
            pieces += [(size, clock_s + layer.backward_s * (n + 1) / count) for n in range(count)]
        clock_s += layer.backward_s
    return pieces
