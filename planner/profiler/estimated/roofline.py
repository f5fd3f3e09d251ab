"""Compute the seconds of operations on a device: the roofline, and on GPUs the tiles of products
and convolutions.

A product of (m, k) by (k, n) is computed in tiles of its result. A processor (SM) computes one tile
at a time, so tiles run in waves of as many as there are processors, and the last wave may be nearly
empty. Products of few tiles divide k among processors as well. Larger tiles read less per
multiplication and reach more of the peak. See NVIDIA, "Matrix Multiplication Background User's
Guide" (2023), sections 3 and 4: tile and wave quantization.

    t     = waves · 2·a·b·(k/s + k0) / (peak/processors · rate)
    waves = ceil(batch·ceil(m/a)·ceil(n/b)·s / processors)

is the least over the tiles (a, b) and divisions s; `rate` is of the tile, and the share of the peak
is the class's.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.profiler.estimated.devices import (
    COMPUTE_CLASSES,
    HOSTS,
    MEMORY_CLASSES,
    OP_CLASSES,
    DeviceSpec,
    OpClass,
)
from planner.profiler.estimated.eight_bit_gpus import EIGHT_BITS
from planner.profiler.estimated.operations import Operation

Floats = NDArray[np.float64]

# Rows, columns, and the rate that a tile reaches relative to the largest. The sizes are cuBLAS's;
# the rates follow the figure of the guide's section 4.1, where 64x64 reaches about two thirds of
# 256x128.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.65),
)
_DIVISIONS = (1, 2, 4, 8, 16)  # of k
# k0: multiplications per element of a tile that filling and writing it cost, by the speed of a
# processor in TFLOP/s: filling takes its time, however fast the products are. The limits are those
# of single precision, and of A100 and H100.
_DEPTH_PER_TFLOPS, _DEPTHS = 55, (64, 160)
_DEPTH_IN_EIGHT_BITS = 2 * _DEPTHS[1]


def shares_of_peak(
    sizes: NDArray[np.int64], processors: int, depth: Floats | int = _DEPTHS[0]
) -> Floats:
    """Return the share of the peak of each product, before the share that the device reaches at
    all.

    Args:
        sizes: (products, 4): how many of equal size, m, n and k. Rows with a 0 compute nothing, as
            those of an expert that no token chose, and give 1.
        processors: over which the tiles are spread.
        depth: k0, of each product or of all.
    """
    count, m, n, k = (sizes[:, column].astype(np.float64) for column in range(4))
    useful = count * m * n * k
    best = np.full(len(sizes), np.inf)
    for rows, columns, rate in _TILES:
        tiles = count * np.ceil(m / rows) * np.ceil(n / columns)
        for division in _DIVISIONS:
            waves = np.ceil(tiles * division / processors)
            spent = waves * processors * rows * columns * (k / division + depth) / rate
            best = np.minimum(best, spent)

    return np.where(useful > 0, useful / np.maximum(best, 1.0), 1.0)


class Costs:
    """Costs of operations as arrays, in the order in which they ran.

    Nothing else asks a device how fast it is: a table of measured times would be read here.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        def column(name: str) -> Floats:
            return np.array([getattr(op, name) for op in operations], dtype=np.float64)

        self._flops = column("flops")
        self._bytes = column("bytes")
        self._limits = column("limit")
        self.launches = column("launches")
        self._dtypes = [op.dtype for op in operations]

        classes = [OP_CLASSES.index(op.op_class) for op in operations]
        self._class = np.array(classes, dtype=np.int64)
        products = [op.product or (0, 0, 0, 0) for op in operations]
        self._products = np.array(products, dtype=np.int64).reshape(-1, 4)

    def seconds(self, spec: DeviceSpec) -> Floats:
        """Return each operation's roofline time (Williams et al. 2009): the slower of compute and
        memory, plus launch.

        t = max(flops / min(peak · achieved, processors · limit), bytes / (bandwidth · achieved)) +
        launches · launch_s
        """
        busy_s = np.maximum(self._compute_seconds(spec), self._memory_seconds(spec))
        return np.asarray(busy_s + self.launches * spec.launch_s)

    def _compute_seconds(self, spec: DeviceSpec) -> Floats:
        peaks = {dtype: spec.peak(dtype) for dtype in set(self._dtypes)}
        peak = np.array([peaks[dtype] for dtype in self._dtypes], dtype=np.float64)
        rate = peak * self._achieved(spec, peak)
        limit = self._limits * (spec.processors or 1)
        return np.asarray(self._flops / np.minimum(rate, limit))

    def _achieved(self, spec: DeviceSpec, peak: Floats) -> Floats:
        """Return the share of its peak that each operation reaches."""
        # Operations of the memory classes have no flops, so their share does not matter.
        of_compute = [spec.achieved_arithmetic[name] for name in COMPUTE_CLASSES]
        of_memory = [1.0] * len(MEMORY_CLASSES)
        share = np.array([*of_compute, *of_memory])[self._class]

        in_eight_bits = np.isin(self._dtypes, EIGHT_BITS)
        if spec.eight_bits is not None:
            share = np.where(in_eight_bits, spec.eight_bits.share, share)
        if spec.processors is None or not self._products.any():
            return share

        depth = np.clip(_DEPTH_PER_TFLOPS * peak / 1e12 / spec.processors, *_DEPTHS)
        depth = np.where(in_eight_bits, _DEPTH_IN_EIGHT_BITS, depth)
        return share * shares_of_peak(self._products, spec.processors, depth)

    def _memory_seconds(self, spec: DeviceSpec) -> Floats:
        shares = [spec.achieved_bandwidth[name] for name in OP_CLASSES]
        achieved = np.array(shares)[self._class]
        return np.asarray(self._bytes / (spec.bandwidth_bytes_per_s * achieved))

    def host_seconds(self, spec: DeviceSpec) -> Floats:
        """Return how long a GPU's host takes to launch each operation: one call launches all of a
        recurrent layer.
        """
        recurrent, inside = (
            self._class == OP_CLASSES.index("recurrent"),
            min(spec.dispatch_s, HOSTS["fused"]),
        )
        return np.asarray(self.launches * np.where(recurrent, inside, spec.dispatch_s))

    def classes(self) -> set[OpClass]:
        """Return the classes that occur."""
        return {OP_CLASSES[index] for index in set(self._class.tolist())}
