"""The workers of this host as a cluster: how many there can be, and the measured link between
them.
"""

from planner.formats.cluster import Cluster, flat_cluster
from planner.formats.files import replace
from planner.formats.names import Backend, DeviceType
from planner.formats.profile import Profile
from planner.profiler.links.measure_cluster import measure_host
from planner.workers.place import available_cores, gpus_here


def places_here(kind: DeviceType) -> int:
    """Return how many workers of a kind have a device or a core of this host for themselves."""
    return max(1, gpus_here()) if kind != "cpu" else available_cores()


def neighbours_of(workers: int, kind: DeviceType) -> int:
    """Return how many processes share caches and memory when so many workers train here, the
    profiled one among them; a GPU has its own.
    """
    return min(workers, places_here(kind)) if kind == "cpu" else 1


def cluster_here(
    profile: Profile, workers: int, kind: DeviceType, backend: Backend | None = None
) -> Cluster:
    """Measure the link between workers of this host, and return them as a cluster.

    Each has its share of the memory that the profile tells of.

    Raises:
        WorkerError: if the workers cannot be started or reach each other.
    """
    sharing = workers if kind == "cpu" else -(-workers // places_here(kind))
    memory_bytes = profile.device.memory_bytes
    if memory_bytes is not None:
        memory_bytes //= sharing

    if workers == 1:
        # The rate is that of two CPU workers, for what-if questions: one worker sends nothing.
        rate = measure_host(2, "cpu").levels[0].bandwidth_bytes_per_s
        return flat_cluster(1, rate, memory_bytes)

    measured = measure_host(workers, kind, backend)
    return replace(measured, memory_bytes=memory_bytes)
