"""The arguments that describe a cluster and what a plan on it must respect, the same for every verb."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import planner
from planner.cli.output import refuse
from planner.errors import ClusterError, InputError
from planner.formats.link_names import ACHIEVED_BYTES_PER_S, link_bandwidth
from planner.formats.names import CODEC_NAMES, CODECS
from planner.options.numbers import is_count
from planner.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from planner.formats.constraints import Constraints

T = TypeVar("T")
_LINKS = ("gpus", "topology", "bandwidth", "latency", "own_links", "no_overlap")  # in place of which stands --cluster
CLUSTER = (*_LINKS, "cluster", "memory", "kinds", "compress", "sequence_parallel")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "cluster"; `cluster_of` reads it."""
    cluster = parser.add_argument_group("cluster", "--bandwidth with --gpus or --topology; or --cluster")
    cluster.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (workers), all joined alike")
    help = "sizes of nested groups, inner to outer: 4x8 is 8 servers of 4 GPUs; ranks fill one server after another"
    cluster.add_argument("--topology", type=each(_size, "x"), metavar="SIZES", help=help)
    cluster.add_argument(
        "--bandwidth",
        type=each(link_bandwidth),
        metavar="RATE",
        help="bandwidth of each GPU's link in each direction: 10Gbps counts bits, 1.25GB/s counts bytes; "
        f"{', '.join(ACHIEVED_BYTES_PER_S)} are what such links achieve; with --topology one per level, inner to "
        "outer: nvlink4,100Gbps",
    )
    help = "latency of a message: 50us, 0.1ms; with --topology one for all levels, or one per level (default: 0s)"
    cluster.add_argument("--latency", type=each(parse_seconds), metavar="TIME", help=help)
    help = "memory of each GPU: 16GB (10^9) or 16GiB (2^30) (default: that of the profiled GPU; unlimited for a CPU)"
    cluster.add_argument("--memory", type=parse_bytes, metavar="SIZE", help=help)
    cluster.add_argument(
        "--kinds",
        type=_kinds,
        metavar="NAME=N,NAME=N",
        help="where GPUs differ: how many there are of each kind of the profile, in the order of the ranks; with "
        "--topology ranks fill one server after another",
    )
    help = "with --topology: each GPU has its own link at every level (default: the GPUs of a server share one)"
    cluster.add_argument("--own-links", action="store_true", help=help)
    help = "messages do not overlap with computation: for CPU workers that use every core of their host"
    cluster.add_argument("--no-overlap", action="store_true", help=help)
    add_compress_argument(cluster, "none, or what --cluster says")
    cluster.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="price groups of --tensor that divide by tokens what each rank would compute whole, as Megatron does; "
        "plan train does not run such plans",
    )
    help = "cluster.json, in place of the arguments above except --memory, --compress and --sequence-parallel"
    cluster.add_argument("--cluster", type=Path, metavar="FILE", help=help)


def add_compress_argument(parser: argparse._ActionsContainer, default: str = "none") -> None:
    """Declare how stages send; without it the value is None."""
    kinds = "; ".join(f"{codec.name}: {codec.summary}" for codec in CODECS.values())
    text = f"send activations and their gradients between stages {kinds} (default: {default})"
    parser.add_argument("--compress", choices=CODEC_NAMES, help=text)


def cluster_of(args: argparse.Namespace, profile: planner.Profile) -> planner.Cluster:
    """Return the cluster that the arguments describe, with what the profile says of its kinds of GPUs.

    Raises:
        ClusterError: when they do not describe one.
    """
    from planner.formats.cluster import DeviceKind, load_cluster
    from planner.formats.device_kinds import cluster_for

    memory_bytes = args.memory
    # A CPU's memory is the whole machine's, which says little about one worker; each of several kinds has its own.
    if args.memory is None and profile.device.kind != "cpu" and not profile.kinds:
        memory_bytes = profile.device.memory_bytes
    if args.cluster is not None:
        refuse(args, "cluster", *_LINKS)
        cluster = load_cluster(args.cluster)
        if args.memory is not None or cluster.memory_bytes is None:
            cluster = cluster.model_copy(update={"memory_bytes": memory_bytes})
    else:
        cluster = _linked(args, memory_bytes)
    changes: dict[str, object] = {}
    if args.kinds is not None:
        counts = [count for _, count in args.kinds]
        if sum(counts) != cluster.gpus:
            raise ClusterError(
                f"the kinds are {' + '.join(map(str, counts))} GPUs, and the cluster has {cluster.gpus}",
                hint="give `kinds` as many GPUs as `gpus` or `topology`",
            )
        changes["kinds"] = tuple(DeviceKind(name=name, count=count) for name, count in args.kinds)
    if args.compress is not None:
        changes["compress"] = args.compress
    if args.sequence_parallel:
        changes["sequence_parallel"] = True
    return cluster_for(profile, cluster.model_copy(update=changes))


def _linked(args: argparse.Namespace, memory_bytes: int | None) -> planner.Cluster:
    """Return the cluster of the links that the arguments describe."""
    from planner.formats.cluster import hierarchical_cluster

    if args.bandwidth is None:
        raise ClusterError("the cluster has no bandwidth", hint="give --bandwidth 10Gbps, or --cluster cluster.json")
    latencies, overlap = args.latency or [0.0], not args.no_overlap
    if args.topology is not None:
        refuse(args, "topology", "gpus")
        if len(latencies) == 1:
            latencies = latencies * len(args.topology)
        links = args.topology, args.bandwidth, memory_bytes, latencies
        return hierarchical_cluster(*links, shared=not args.own_links, overlap=overlap)
    if args.gpus is None:
        hint = "give --gpus 8, --topology 4x2, or --cluster cluster.json"
        raise ClusterError("the cluster has no number of GPUs", hint=hint)
    refuse(args, "gpus", "own_links")
    for values, what in ((args.bandwidth, "--bandwidth"), (latencies, "--latency")):
        if len(values) != 1:
            raise ClusterError(f"{what} has {len(values)} values for one level", hint="name the levels with --topology")
    return planner.flat_cluster(args.gpus, args.bandwidth[0], memory_bytes, latencies[0], overlap=overlap)


def _kinds(text: str) -> list[tuple[str, int]]:
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name and count.isdigit() and int(count) for name, _, count in parts):
        raise ClusterError(f"'{text}' does not say how many GPUs of which kind", hint="write --kinds a100=4,t4=4")
    return [(name, int(count)) for name, _, count in parts]


def _size(text: str) -> int:
    if not is_count(text):
        raise ClusterError(f"'{text}' is not a number of members", hint="write --topology 4x8, inner to outer")
    return int(text)


def each(parse: Callable[[str], T], separator: str = ",") -> Callable[[str], list[T]]:
    """Return a parser of values with separators between them."""

    def parsed(text: str) -> list[T]:
        parts = text.split(separator)
        if len(parts) > 1 and "" in parts:
            raise ClusterError(
                f"'{text}' lacks a value before or after '{separator}'",
                hint=f"write values with one '{separator}' between them",
            )
        return [parse(part) for part in parts]

    return parsed


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the group "constraints"; `constraints_of` reads it."""
    group = parser.add_argument_group("constraints", "layers are named as in the profile; each option may be repeated")
    for flag, metavar, help in (
        ("--pin", "LAYER=STAGE", "put the layer in that stage, counted from 0"),
        ("--pin-gpu", "LAYER=RANK", "run the layer on the GPU of that rank, in a cluster whose GPUs differ"),
        ("--colocate", "LAYER,LAYER", "keep these layers in one stage"),
        ("--forbid-cut-after", "LAYER", "keep the layer in one stage with the next one in the profile"),
    ):
        group.add_argument(flag, action="append", default=[], metavar=metavar, help=help)
    help = "constraints.json, in place of the arguments above"
    group.add_argument("--constraints", type=Path, metavar="FILE", help=help)


def constraints_of(args: argparse.Namespace) -> Constraints:
    """Return the constraints that the arguments describe; raise InputError when they do not describe any."""
    from planner.formats.constraints import Constraints, load_constraints

    given = Constraints(
        stage_of=dict(_pair(text, "--pin", "STAGE") for text in args.pin),
        gpu_of=dict(_pair(text, "--pin-gpu", "RANK") for text in args.pin_gpu),
        together=tuple(tuple(text.split(",")) for text in args.colocate),
        no_cut_after=tuple(args.forbid_cut_after),
    )
    if args.constraints is None:
        return given
    if not given.empty:
        raise InputError("--constraints and other constraints are both given", hint="write all of them into the file")
    return load_constraints(args.constraints)


def _pair(text: str, option: str, what: str) -> tuple[str, int]:
    layer, separator, number = text.rpartition("=")
    if not separator or not is_count(number):
        raise InputError(f"{option} '{text}' is not LAYER={what}", hint=f"for example: {option} classifier.6=1")
    return layer, int(number)
