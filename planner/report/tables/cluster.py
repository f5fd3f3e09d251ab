"""The table of a cluster."""

from __future__ import annotations

from planner.formats.cluster import Cluster
from planner.report.tables.table import Table
from planner.units import format_bandwidth, format_seconds

NO_OVERLAP = "The workers compute on every core, so messages take time from the computation and do not overlap with it."


def cluster_report(cluster: Cluster) -> str:
    """List the levels, inner to outer."""
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
    table = Table(["level", "members", "bandwidth", "latency", "all-reduce"], rows).text()
    return table if cluster.overlap else f"{table}\n\n{NO_OVERLAP}"
