"""The cluster: how many devices, how much memory each, and the links between them."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from planner.arguments import checked
from planner.errors import ClusterError
from planner.formats.files import (
    AlwaysTrue,
    GrownRecord,
    Record,
    first_problem,
    load_record,
    replace,
    save_record,
)
from planner.formats.link_names import RateSource, link_bandwidth, rate_source
from planner.formats.names import Backend, CodecName
from planner.formats.quantities import (
    MOST_GPUS,
    BytesPerSecond,
    NonNegativeFloat,
    PositiveFloat,
    Seconds,
    SomeBytes,
    Workers,
)
from planner.formats.shown import Shown
from planner.units import counted, parse_bytes, parse_seconds


class Level(GrownRecord):
    """Groups of `size` members, joined by links: the innermost are of devices, the next ones of
    those groups.
    """

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {
            f"{what}_{name}"
            for what in ("sum", "gather", "scatter")
            for name in ("bandwidth_bytes_per_s", "latency_s")
        }
        | {"sum_wait_share", "sum_wait_s", "rate_source", "one_ring_bandwidth_bytes_per_s"}
        | {"all_reduce_between_bytes_per_s"}
    )

    size: Workers
    bandwidth_bytes_per_s: BytesPerSecond  # of a member's link in each direction (full duplex)
    latency_s: Seconds = 0.0  # of a message
    all_reduce_bandwidth_bytes_per_s: BytesPerSecond | None = None  # where measured to differ
    # slowest and fastest measurement of it, where they are far apart: something else was at work
    all_reduce_between_bytes_per_s: tuple[BytesPerSecond, BytesPerSecond] | None = None
    # At most for one all-reduce, where several at once reach more: a ring enters and leaves a
    # server by one port, and other rings use the others.
    one_ring_bandwidth_bytes_per_s: BytesPerSecond | None = None
    # Of the all-reduces between the computations of ranks that divide layers, where measured: the
    # latency of a step.
    sum_bandwidth_bytes_per_s: BytesPerSecond | None = None
    sum_latency_s: Seconds | None = None
    # For the slowest of them a rank waits this share of what it has computed since the last one, at
    # most so long.
    sum_wait_share: NonNegativeFloat | None = None
    sum_wait_s: Seconds | None = None
    # The same of a unit's weights that replicas gather, and of its gradients, each summed where it
    # is needed alone.
    gather_bandwidth_bytes_per_s: BytesPerSecond | None = None
    gather_latency_s: Seconds | None = None
    scatter_bandwidth_bytes_per_s: BytesPerSecond | None = None
    scatter_latency_s: Seconds | None = None
    shared: bool = True  # the devices of a member share its link; false: each has one of its own
    # where the bandwidth comes from; None: whoever wrote it knows
    rate_source: RateSource | None = None

    @property
    def ring_bytes_per_s(self) -> float | None:
        """What one all-reduce reaches; None where that is not known to differ."""
        rates = (self.all_reduce_bandwidth_bytes_per_s, self.one_ring_bandwidth_bytes_per_s)
        return min((rate for rate in rates if rate is not None), default=None)

    def times_as_fast(self, ratio: float) -> "Level":
        """Return the level with so many times the bandwidth, also of what was measured of
        all-reduces and the like.
        """
        rates = {name: getattr(self, name) for name in RATES}
        return replace(self, **{name: rate and rate * ratio for name, rate in rates.items()})


RATES = tuple(name for name in Level.model_fields if name.endswith("bandwidth_bytes_per_s"))
WAITS = (
    "sum_wait_share",
    *(name for name in Level.model_fields if name.endswith("_s") and not name.endswith("_per_s")),
)


class DeviceKind(GrownRecord):
    """Consecutive ranks with devices of one kind, in a cluster of several kinds."""

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"name", "device", "shares_of", "link_ratios"}
    )

    count: Workers
    name: str | None = None  # as the profile calls it, where that has several kinds
    speed: PositiveFloat = 1.0  # relative to the profiled device of that name
    memory_bytes: SomeBytes | None = None  # per device; None for that of the cluster
    # name of the device that was measured; workers on these ranks must have it
    device: str | None = None
    # of an estimate: the device whose kernels were measured in place of its own
    shares_of: str | None = None
    # of their links' bandwidths to the levels', one per level, inner to outer; None: 1 at each
    link_ratios: tuple[PositiveFloat, ...] | None = None
    pays_transfers: AlwaysTrue = True  # always true; files of version 0.1 have it

    @property
    def title(self) -> str:
        """Name for people: the profile's, and the speed where that differs."""
        speed = f"speed {self.speed:g}"
        if self.name is None:
            return speed
        if self.speed == 1:
            return self.name
        return f"{self.name} of {speed}"


class CodecTime(Record):
    """What a codec takes of a worker's time."""

    codec: CodecName
    s_per_byte: Seconds  # of a byte on the link, at either end


class OptimizerOffload(Record):
    """Masters and the optimizer's state are in the memory of the host, whose CPU steps them."""

    link_bytes_per_s: BytesPerSecond  # between a GPU and that memory, in each direction
    # of that memory, which a GPU's part of the step reads and writes
    step_bytes_per_s: BytesPerSecond


class Cluster(Shown, GrownRecord):
    """Devices and the links between them. Devices are ranks 0 to gpus-1, filling one server after
    another.
    """

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"backend", "compress", "codec_times", "sequence_parallel", "offload"}
    )

    schema_version: Literal[1] = 1
    levels: Annotated[tuple[Level, ...], Field(min_length=1)]  # inner to outer
    memory_bytes: SomeBytes | None = None  # per device; None for no limit
    # messages travel while devices compute; not on a CPU without a core to spare
    overlap: bool = True
    backend: Backend | None = None  # that the links were measured with
    compress: CodecName = "none"  # how activations and their gradients travel between stages
    codec_times: tuple[CodecTime, ...] = ()  # where measured; other codecs count no time
    # groups divide layers by tokens, too, where each rank would compute the same
    sequence_parallel: bool = False
    offload: OptimizerOffload | None = None  # None: masters and states are on the GPUs
    # all devices by rank, where they differ; empty: all are like the profiled one
    kinds: tuple[DeviceKind, ...] = ()

    @property
    def gpus(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def coding_s_per_byte(self) -> float:
        """Seconds that either end of a link takes to code or decode a byte on it."""
        return next(
            (each.s_per_byte for each in self.codec_times if each.codec == self.compress), 0.0
        )

    def kind_of(self, rank: int) -> DeviceKind:
        """Return the kind of the device of this rank."""
        return next(
            kind for kind, ranks in zip(self.kinds, self.kind_ranks, strict=True) if rank in ranks
        )

    @property
    def kind_ranks(self) -> tuple[range, ...]:
        """The ranks of each kind's devices."""
        ends = list(accumulate((kind.count for kind in self.kinds), initial=0))
        return tuple(range(first, end) for first, end in pairwise(ends))

    def memory_of(self, kind: DeviceKind | None) -> int | None:
        """Return the memory of a device of that kind in bytes; None for no limit."""
        if kind is None or kind.memory_bytes is None:
            return self.memory_bytes
        return kind.memory_bytes

    def kinds_on(self, ranks: Iterable[int]) -> str:
        """Return the names of the kinds of these devices, for people; "" where all are alike."""
        if not self.kinds:
            return ""
        return " + ".join(dict.fromkeys(self.kind_of(rank).title for rank in sorted(ranks)))

    def memory_on(self, ranks: Iterable[int]) -> int | None:
        """Return the memory of the smallest of these devices in bytes; None for no limit."""
        if not self.kinds:
            return self.memory_bytes
        limits = [
            limit for rank in ranks if (limit := self.memory_of(self.kind_of(rank))) is not None
        ]
        return min(limits, default=None)

    @property
    def most_memory_bytes(self) -> int | None:
        """The memory of the largest device in bytes; None for no limit."""
        limits = [self.memory_of(kind) for kind in self.kinds or (None,)]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else None

    @property
    def kinds_words(self) -> str:
        """How many devices there are of each kind: "12 v100 + 4 t4"; "" where all are alike."""
        return " + ".join(f"{kind.count} {kind.title}" for kind in self.kinds)

    @property
    def has_memory_limit(self) -> bool:
        return any(self.memory_of(kind) is not None for kind in self.kinds or (None,))

    def with_memory(self, change: Callable[[int], int | None]) -> "Cluster":
        """Return the cluster with another memory for each that is limited, also of kinds."""

        def limit(memory_bytes: int | None) -> int | None:
            if memory_bytes is None:
                return None
            return change(memory_bytes)

        kinds = tuple(
            replace(kind, memory_bytes=limit(self.memory_of(kind))) for kind in self.kinds
        )
        return replace(self, memory_bytes=limit(self.memory_bytes), kinds=kinds)

    @model_validator(mode="after")
    def _check_counts(self) -> "Cluster":
        if self.gpus > MOST_GPUS:
            raise ValueError(
                f"{self.gpus} devices are beyond the {MOST_GPUS} that can be solved for"
            )

        if self.kinds and sum(kind.count for kind in self.kinds) != self.gpus:
            counts = " + ".join(str(kind.count) for kind in self.kinds)
            raise ValueError(
                f"kinds of {counts} devices are not the {self.gpus} devices of the levels"
            )

        for kind in self.kinds:
            if kind.link_ratios is not None and len(kind.link_ratios) != len(self.levels):
                raise ValueError(
                    f"the kind {kind.title} has {counted(len(kind.link_ratios), 'link ratio')} for "
                    f"{counted(len(self.levels), 'level')}"
                )

        return self

    @property
    def joined(self) -> tuple[Level, ...]:
        """The levels that join more than one member; the innermost if none does."""
        return tuple(level for level in self.levels if level.size > 1) or self.levels[:1]

    @property
    def joined_numbers(self) -> tuple[int, ...]:
        """The numbers of the levels in `joined`."""
        joining = [number for number, level in enumerate(self.levels) if level.size > 1]
        return tuple(joining or [0])

    @property
    def has_own_links(self) -> bool:
        """Whether devices of some kind have links of other rates than the levels'."""
        return any(kind.link_ratios is not None for kind in self.kinds)

    def slowest_link_ratio(self, number: int) -> float:
        """Return the ratio of the slowest kind's links to the rate of a level."""
        ratios = (kind.link_ratios for kind in self.kinds)
        return min((1.0 if each is None else each[number] for each in ratios), default=1.0)

    @property
    def level_by_data_sheet(self) -> int | None:
        """The outermost level that joins members at the rate of a data sheet; None without such."""
        for number in reversed(range(len(self.levels))):
            level = self.levels[number]
            if level.size > 1 and level.rate_source == "data sheet":
                return number
        return None

    def level_times_as_fast(self, number: int, ratio: float) -> "Cluster":
        """Return the cluster with so many times the bandwidth at one level."""
        levels = list(self.levels)
        levels[number] = levels[number].times_as_fast(ratio)
        return replace(self, levels=tuple(levels))

    @property
    def slowest_ring_bytes_per_s(self) -> float | None:
        """What one all-reduce over all devices reaches; None where that is not known to differ."""
        rates = [
            level.ring_bytes_per_s * self.slowest_link_ratio(number)
            for number, level in enumerate(self.levels)
            if level.ring_bytes_per_s is not None
        ]
        return min(rates, default=None)

    @property
    def slowest_bandwidth_bytes_per_s(self) -> float:
        """Bytes per second of the slowest link that joins devices of the cluster."""
        return min(
            self.levels[number].bandwidth_bytes_per_s * self.slowest_link_ratio(number)
            for number in self.joined_numbers
        )


@checked
def flat_cluster(
    gpus: int,
    bandwidth_bytes_per_s: float | str,
    memory_bytes: int | str | None = None,
    latency_s: float | str = 0.0,
    *,
    all_reduce_bandwidth_bytes_per_s: float | str | None = None,
    overlap: bool = True,
) -> Cluster:
    """Return a cluster of `gpus` devices, each on a link of its own.

    Quantities are numbers, or texts with a unit as the command line takes them: "10Gbps",
    "nvlink4", "16GB", "50us".

    Raises:
        ClusterError: for less than one device, or more than `MOST_GPUS`, and for quantities that
            make no sense.
        UnitError: for a text without a unit.

    Example:
        >>> in_bytes = planner.flat_cluster(gpus=8, bandwidth_bytes_per_s=1.25e9)
        >>> planner.flat_cluster(8, "10Gbps") == in_bytes
        True
    """
    reduces = (all_reduce_bandwidth_bytes_per_s,)
    return _cluster(
        (gpus,), (bandwidth_bytes_per_s,), (latency_s,), memory_bytes, overlap, reduces=reduces
    )


@checked
def hierarchical_cluster(
    sizes: Sequence[int],
    bandwidths_bytes_per_s: Sequence[float | str],
    memory_bytes: int | str | None = None,
    latencies_s: Sequence[float | str] = (),
    *,
    shared: bool = True,
    overlap: bool = True,
) -> Cluster:
    """Return a cluster of nested groups, inner to outer: sizes (4, 8) are 8 servers of 4 devices.

    Quantities are numbers, or texts with a unit, and errors are raised as for `flat_cluster`.

    Args:
        sizes: members of a group, per level.
        bandwidths_bytes_per_s: of a member's link, per level.
        memory_bytes: per device; None for no limit.
        latencies_s: per level; none for zero.
        shared: whether the devices of a group share its link to the next level.
        overlap: as for `Cluster`.

    Example:
        >>> planner.hierarchical_cluster((4, 8), ("nvlink3", "100Gbps")).gpus
        32
    """
    latencies_s = latencies_s or (0.0,) * len(sizes)
    for values, what in ((bandwidths_bytes_per_s, "`bandwidth`"), (latencies_s, "`latency`")):
        if len(values) != len(sizes):
            levels = f"{counted(len(sizes), 'level')} of {'x'.join(map(str, sizes))}"
            raise ClusterError(
                f"{what} has {counted(len(values), 'value')} for {levels}",
                hint="give one per level, inner to outer, such as 128Gbps,10Gbps for 4x8",
            )

    return _cluster(sizes, bandwidths_bytes_per_s, latencies_s, memory_bytes, overlap, shared)


def _cluster(
    sizes: Sequence[int],
    bandwidths: Sequence[float | str],
    latencies: Sequence[float | str],
    memory: int | str | None,
    overlap: bool,
    shared: bool = True,
    reduces: Sequence[float | str | None] = (),
) -> Cluster:
    for size in (*sizes, math.prod(sizes)):
        checked_gpus(size)
    levels = [
        {
            "size": size,
            "bandwidth_bytes_per_s": link_bandwidth(bandwidth)
            if isinstance(bandwidth, str)
            else bandwidth,
            "latency_s": parse_seconds(latency) if isinstance(latency, str) else latency,
            "all_reduce_bandwidth_bytes_per_s": link_bandwidth(reduced)
            if isinstance(reduced, str)
            else reduced,
            "shared": shared,
            "rate_source": rate_source(bandwidth) if isinstance(bandwidth, str) else None,
        }
        for size, bandwidth, latency, reduced in zip_longest(sizes, bandwidths, latencies, reduces)
    ]
    if isinstance(memory, str):
        memory = parse_bytes(memory)
    try:
        return Cluster.model_validate(
            {"levels": levels, "memory_bytes": memory, "overlap": overlap}
        )
    except ValidationError as cause:
        problem = first_problem(cause)
        raise ClusterError(
            f"there is no such cluster: {problem}", hint="see `planner.flat_cluster`"
        ) from None


def load_cluster(path: Path | str) -> Cluster:
    """Read `cluster.json`; raise ClusterError naming the file, the field and the value that is
    wrong.
    """
    cluster = load_record(Cluster, path, ClusterError, "see cluster.json in the file formats")
    checked_gpus(cluster.gpus)
    return cluster


def save_cluster(cluster: Cluster, path: Path | str) -> None:
    """Write `cluster` to `path` atomically."""
    save_record(cluster, path)


def checked_gpus(gpus: int) -> int:
    """Return a number of GPUs; raise ClusterError for one that is no cluster's."""
    if gpus < 1:
        raise ClusterError(
            f"a cluster of {gpus} GPUs cannot train anything", hint="give `gpus` 1 or more"
        )

    if gpus > MOST_GPUS:
        raise ClusterError(
            f"a cluster of {gpus} GPUs is beyond the {MOST_GPUS} that can be solved for",
            hint="give fewer",
        )

    return gpus
