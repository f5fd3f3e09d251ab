"""The cluster: how many devices, how much memory each, and the links between them."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from planner.errors import ClusterError
from planner.files import Record

MOST_GPUS = 2**17  # a plan names every rank


class Level(Record):
    """One level of the hierarchy, inner to outer: groups of `size` members joined by links of this speed.

    `bandwidth_bytes_per_s` is what one member sends while it receives as much (full duplex);
    `all_reduce_bandwidth_bytes_per_s` the same within an all-reduce, where it was measured to be another.
    """

    size: Annotated[int, Field(ge=1)]
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Annotated[float, Field(ge=0)] = 0.0
    all_reduce_bandwidth_bytes_per_s: Annotated[float, Field(gt=0)] | None = None


class Cluster(Record):
    """Devices are ranks 0..gpus-1, filled server by server; `memory_bytes` is per device, None for no limit.

    `overlap`: whether messages travel while devices compute. Not so on a CPU without a core to spare, where the
    workers' own cores move the bytes.
    """

    levels: Annotated[tuple[Level, ...], Field(min_length=1)]
    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    overlap: bool = True

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return math.prod(level.size for level in self.levels)

    @property
    def slowest_bandwidth_bytes_per_s(self) -> float:
        """Bandwidth of the slowest level that joins more than one member."""
        joined = [level.bandwidth_bytes_per_s for level in self.levels if level.size > 1]
        return min(joined, default=self.levels[0].bandwidth_bytes_per_s)


def flat_cluster(
    gpus: int,
    bandwidth_bytes_per_s: float,
    memory_bytes: int | None = None,
    latency_s: float = 0.0,
    *,
    all_reduce_bandwidth_bytes_per_s: float | None = None,
    overlap: bool = True,
) -> Cluster:
    """A cluster of `gpus` devices, each on a link of its own.

    Raises:
        ClusterError: for a number of devices below one or beyond `MOST_GPUS`.
    """
    if gpus < 1:
        raise ClusterError(f"a cluster of {gpus} GPUs cannot train anything", hint="give --gpus 1 or more")
    if gpus > MOST_GPUS:
        raise ClusterError(
            f"a cluster of {gpus} GPUs is beyond the {MOST_GPUS} that can be solved for", hint="give fewer"
        )
    level = Level(
        size=gpus,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        latency_s=latency_s,
        all_reduce_bandwidth_bytes_per_s=all_reduce_bandwidth_bytes_per_s,
    )
    return Cluster(levels=(level,), memory_bytes=memory_bytes, overlap=overlap)
