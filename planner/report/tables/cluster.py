"""A cluster for people."""

from __future__ import annotations

from tabulate import tabulate

from planner.formats.cluster import Cluster
from planner.units import format_bandwidth, format_seconds


def cluster_report(cluster: Cluster) -> str:
    """Its levels, inner to outer."""
    rows = [
        [
            index,
            level.size,
            format_bandwidth(level.bandwidth_bytes_per_s),
            format_seconds(level.latency_s),
            format_bandwidth(level.all_reduce_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s),
        ]
        for index, level in enumerate(cluster.levels)
    ]
    headers = ["level", "members", "bandwidth", "latency", "all-reduce"]
    return tabulate(rows, headers=headers, disable_numparse=True)
