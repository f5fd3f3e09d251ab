"""The arguments that describe a cluster, the same for every verb that needs one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from planner.errors import ClusterError
from planner.units import parse_bandwidth, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from planner.formats.cluster import Cluster
    from planner.formats.profile import Profile

T = TypeVar("T")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "cluster"; `cluster_of` reads it."""
    cluster = parser.add_argument_group("cluster", "--gpus or --topology with --bandwidth, or --cluster")
    cluster.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (workers), all equally far apart")
    cluster.add_argument(
        "--topology",
        type=_each(_size, "x"),
        metavar="SIZES",
        help="groups of groups, inner to outer: 4x8 is 8 servers of 4 GPUs; ranks fill servers in order",
    )
    cluster.add_argument(
        "--bandwidth",
        type=_each(parse_bandwidth),
        metavar="RATE",
        help="of each GPU's link, each way: 10Gbps counts bits, 1.25GB/s counts bytes; with --topology one per level, "
        "inner to outer: 128Gbps,10Gbps",
    )
    cluster.add_argument(
        "--latency",
        type=_each(parse_seconds),
        metavar="TIME",
        help="of a message: 50us, 0.1ms; with --topology one for all levels or one per level (default: 0s)",
    )
    cluster.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="SIZE",
        help="of each GPU: 16GB (10^9) or 16GiB (2^30) (default: that of the profiled GPU; no limit for a CPU)",
    )
    cluster.add_argument(
        "--own-links",
        action="store_true",
        help="with --topology: each GPU has a link of its own at every level (default: the GPUs of a server share its)",
    )
    cluster.add_argument(
        "--no-overlap",
        action="store_true",
        help="messages do not travel while devices compute: for CPU workers that use every core of their host",
    )
    cluster.add_argument(
        "--cluster", type=Path, metavar="FILE", help="a cluster.json, instead of the arguments above but --memory"
    )


def cluster_of(args: argparse.Namespace, profile: Profile) -> Cluster:
    """The cluster that the arguments describe.

    Raises:
        ClusterError: when they do not describe one.
    """
    from planner.formats.cluster import flat_cluster, hierarchical_cluster, load_cluster

    memory_bytes = _memory(args.memory, profile)
    if args.cluster is not None:
        refuse(args, "--cluster", "gpus", "topology", "bandwidth", "latency", "own_links", "no_overlap")
        cluster = load_cluster(args.cluster)
        if args.memory is None and cluster.memory_bytes is not None:
            return cluster
        return cluster.model_copy(update={"memory_bytes": memory_bytes})
    if args.bandwidth is None:
        raise ClusterError("the cluster has no bandwidth", hint="give --bandwidth 10Gbps, or --cluster cluster.json")
    if args.topology is not None:
        refuse(args, "--topology", "gpus")
        latencies = args.latency or [0.0]
        return hierarchical_cluster(
            args.topology,
            args.bandwidth,
            memory_bytes,
            latencies * len(args.topology) if len(latencies) == 1 else latencies,
            shared=not args.own_links,
            overlap=not args.no_overlap,
        )
    if args.gpus is None:
        raise ClusterError(
            "the cluster has no number of GPUs", hint="give --gpus 8, --topology 4x2, or --cluster cluster.json"
        )
    refuse(args, "--gpus", "own_links")
    for values, what in ((args.bandwidth, "--bandwidth"), (args.latency or [0.0], "--latency")):
        if len(values) != 1:
            raise ClusterError(f"{what} has {len(values)} values for one level", hint="name the levels with --topology")
    return flat_cluster(
        args.gpus,
        args.bandwidth[0],
        memory_bytes,
        args.latency[0] if args.latency else 0.0,
        overlap=not args.no_overlap,
    )


def given(args: argparse.Namespace, name: str) -> bool:
    """Whether the argument was."""
    return getattr(args, name) not in (None, False)


def refuse(args: argparse.Namespace, chosen: str, *others: str, why: str = "") -> None:
    """Refuse arguments that contradict the chosen one.

    Raises:
        ClusterError: naming the first of them.
    """
    for name in others:
        if given(args, name):
            flag = "--" + name.replace("_", "-")
            raise ClusterError(
                f"{flag} has no meaning with {chosen}{why}", hint=f"leave one of {chosen} and {flag} out"
            )


def _memory(asked: int | None, profile: Profile) -> int | None:
    """A CPU's memory is the whole machine's, which says little about one worker."""
    if asked is not None or profile.device.kind == "cpu":
        return asked
    return profile.device.memory_bytes


def _size(text: str) -> int:
    if not text.isdigit():
        raise ClusterError(f"'{text}' is not a number of members", hint="write --topology 4x8, inner to outer")
    return int(text)


def _each(parse: Callable[[str], T], separator: str = ",") -> Callable[[str], list[T]]:
    """Values separated by commas."""
    return lambda text: [parse(part) for part in text.split(separator)]
