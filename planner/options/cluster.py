"""Which GPUs and links a plan is for: the options of `cluster`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from planner.errors import ClusterError
from planner.formats.link_names import ACHIEVED_BYTES_PER_S, known_rate
from planner.formats.names import CODECS, PLANNED, CodecName, OffloadName
from planner.options.numbers import is_count
from planner.options.option import Options, option
from planner.units import parse_bytes, parse_seconds

T = TypeVar("T")


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


def _size(text: str) -> int:
    if not is_count(text):
        raise ClusterError(
            f"'{text}' is not a number of GPUs or servers",
            hint="write GPUs per server x servers: `topology=4x2` are 2 servers of 4 GPUs",
        )
    return int(text)


def sizes_of_levels(text: str) -> list[int]:
    """Return the sizes of a topology such as 4x2.

    Raises:
        ClusterError: for what is not a number between two x.
    """
    return each(_size, "x")(text)


def _kinds(text: str) -> dict[str, int]:
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name and count.isdigit() and int(count) for name, _, count in parts):
        raise ClusterError(
            f"'{text}' does not say how many GPUs of which kind", hint="write `kinds=a100=4,t4=4`"
        )
    return {name: int(count) for name, _, count in parts}


# A quantity is a number in bytes, seconds or bytes per second, or a text with its unit; several are
# one per level.
Quantities: TypeAlias = float | str | Sequence[float | str]


def listed(given: Quantities | None) -> list[float | str]:
    """Return one quantity, or one per level, as a list."""
    if given is None:
        return []
    return [given] if isinstance(given, int | float | str) else list(given)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    """How many GPUs there are, and how they are joined."""

    servers: int | None = option(
        None,
        "number of servers, with `gpus_per_server` or `gpus`",
        "N",
        least=1,
        aliases=("--nnodes",),
    )
    gpus_per_server: int | None = option(
        None,
        "GPUs in each server",
        "N",
        least=1,
        aliases=("--nproc-per-node",),
    )
    gpus: int | None = option(
        None,
        "number of GPUs in all; without `servers`, each has a link of its own to all others",
        "N",
    )
    topology: str | Sequence[int] | None = option(
        None,
        "GPUs per server x servers: 4x2 are 2 servers of 4 GPUs, as with `servers=2` and "
        "`gpus_per_server=4`; "
        "4x2x3 are 3 racks of these",
        "SIZES",
        parse=sizes_of_levels,
    )
    bandwidth: Quantities | None = option(
        None,
        "bandwidth of each GPU's link inside a server, then that of each server's: pcie4,10Gbps; "
        "one rate where there "
        "is one level; 10Gbps counts bits, 1.25GB/s counts bytes, and "
        f"{', '.join(ACHIEVED_BYTES_PER_S)} are what such links achieve",
        "RATE",
        parse=each(known_rate),
    )
    latency: Quantities = option(
        0.0,
        "latency of a message, as 50us, or one per level",
        "TIME",
        parse=each(parse_seconds),
        told="0s",
        advanced=True,
    )
    memory: int | str | None = option(
        None,
        "memory of each GPU: 16GB (10^9) or 16GiB (2^30)",
        "SIZE",
        parse=parse_bytes,
        told=f"{PLANNED} of what the profiled GPU has; unlimited for a CPU",
    )
    kinds: str | Mapping[str, int] | None = option(
        None,
        "how many GPUs there are of each kind of the profile, by rank",
        "NAME=N,NAME=N",
        parse=_kinds,
        advanced=True,
    )
    own_links: bool = option(
        False,
        "with several servers: each GPU has its own link at every level",
        told="the GPUs of a server share one",
        advanced=True,
    )
    no_overlap: bool = option(
        False,
        "messages do not overlap with computation: for CPU workers that use every core of their "
        "host",
        advanced=True,
    )
    compress: CodecName | None = option(
        None,
        "how stages send activations and their gradients. "
        + "; ".join(f"{codec.name}: {codec.summary}" for codec in CODECS.values()),
        told="none, or what `cluster` says",
        advanced=True,
    )
    sequence_parallel: bool = option(
        False,
        "sequence parallelism: tensor-parallel ranks also shard norms and dropouts, by tokens",
        advanced=True,
    )
    offload: OffloadName | None = option(
        None,
        "optimizer: keep masters and the optimizer's state in the memory of the host, whose CPU "
        "steps them (ZeRO-Offload), to say what fits and how fast it would be; `plan train` does "
        "not run it",
        told="all on the GPUs",
        advanced=True,
    )
    host_bandwidth: float | str | None = option(
        None,
        "with `offload`: bandwidth of each GPU's link to the memory of its host, as in pcie4",
        "RATE",
        parse=known_rate,
        told="what its kind has, else pcie4",
        advanced=True,
    )
    cluster: str | Path | None = option(
        None,
        "read the cluster from cluster.json; of the other options only `memory`, `compress`, "
        "`sequence_parallel` and `offload` then apply",
        "FILE",
        parse=Path,
    )
