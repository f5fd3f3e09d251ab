"""Buckets of a replicated stage's gradients: their size, and when in the backward they can be all-reduced.

The executor, which fills buckets, and the simulation, which only knows layers, use the same rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.cost.link import BUCKETS
from planner.formats.profile import Layer

# Smaller buckets would be dominated by latency. The largest are as large as DistributedDataParallel's.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 10**6, 25 * 10**6


def bucket_bytes(total_bytes: int) -> int:
    """Return the bytes at which a bucket is full; it may have more, because a gradient is never divided."""
    return min(max(total_bytes // BUCKETS, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)


def ready_s(
    layers: Sequence[Layer], copied: Sequence[Layer] = (), again_s: Mapping[int, float] | None = None
) -> tuple[float, ...]:
    """Return the seconds from the start of a backward until each of `BUCKETS` equal parts of its gradients is ready.

    A part is ready when the bucket that holds its last byte is full. The last part waits for the end of the backward,
    as in the cost model, which thereby stays a lower bound of every simulation.

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
        return tuple(backward_s * (part + 1) / BUCKETS for part in range(BUCKETS))
    full_bytes, buckets = bucket_bytes(round(total_bytes)), list[tuple[float, float]]()  # bytes so far, time
    size_bytes, done_bytes = 0.0, 0.0
    for size, at_s in pieces:
        if not buckets or size_bytes >= full_bytes:
            buckets.append((0.0, 0.0))
            size_bytes = 0.0
        size_bytes, done_bytes = size_bytes + size, done_bytes + size
        buckets[-1] = done_bytes, at_s
    times, bucket = [], 0
    for part in range(BUCKETS - 1):
        while bucket < len(buckets) - 1 and buckets[bucket][0] < total_bytes * (part + 1) / BUCKETS:
            bucket += 1
        times.append(buckets[bucket][1])
    return (*times, backward_s)


def reduced_s(parts_s: Sequence[float], reduce_s: float) -> float:
    """Return the seconds from the start of a backward to the end of its all-reduce, whose parts are ready then."""
    clock_s = 0.0
    for at_s in parts_s:
        clock_s = max(clock_s, at_s) + reduce_s / len(parts_s)
    return clock_s


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
