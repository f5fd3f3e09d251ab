"""Clusters."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from planner.errors import ClusterError
from planner.formats.cluster import Cluster, Level, flat_cluster


def test_a_flat_cluster_is_one_level() -> None:
    cluster = flat_cluster(8, 1.25e9, 16 * 10**9, 5e-5)
    assert cluster.gpus == 8
    assert cluster.slowest_bandwidth_bytes_per_s == 1.25e9
    assert cluster.levels[0].latency_s == 5e-5


def test_levels_multiply_and_the_slowest_that_joins_anything_counts() -> None:
    cluster = Cluster(
        levels=(
            Level(size=4, bandwidth_bytes_per_s=16e9),
            Level(size=4, bandwidth_bytes_per_s=1.25e9),
        )
    )
    assert cluster.gpus == 16
    assert cluster.slowest_bandwidth_bytes_per_s == 1.25e9
    alone = Cluster(
        levels=(Level(size=4, bandwidth_bytes_per_s=16e9), Level(size=1, bandwidth_bytes_per_s=1.0))
    )
    assert alone.slowest_bandwidth_bytes_per_s == 16e9


def test_nonsense_is_refused() -> None:
    with pytest.raises(ClusterError, match="a cluster of 0 GPUs"):
        flat_cluster(0, 1.0)
    with pytest.raises(ClusterError, match=r"bandwidth_bytes_per_s = 0\.0"):
        flat_cluster(1, 0.0)
    with pytest.raises(ValidationError):
        Cluster(levels=())
