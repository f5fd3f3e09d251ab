"""Servers of GPUs of several kinds, and the clusters of all kinds and of each alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.api.servers import check_rates, divisors, number_of_gpus, number_of_servers
from planner.errors import ClusterError, InputError
from planner.formats.cluster import (
    Cluster,
    DeviceKind,
    checked_gpus,
    flat_cluster,
    hierarchical_cluster,
)
from planner.formats.files import replace
from planner.formats.link_names import link_bandwidth, usual_between, usual_link
from planner.formats.names import CodecName
from planner.options.kinds import Counts, checked_counts, rates_of
from planner.options.verbs import PER_SERVER, FitOptions
from planner.units import counted

Rates = tuple[float | str, float | str]  # of a GPU's link inside a server, and of a server's


def counted_gpus(counts: Counts, gpus: int | None) -> int:
    """Return how many GPUs there are of all kinds; raise ClusterError where `gpus` are others."""
    total = checked_gpus(sum(checked_counts(counts).values()))
    if gpus is not None and gpus != total:
        named = ",".join(f"{name}={number}" for name, number in counts.items())
        raise ClusterError(
            f"`gpu={named}` are {counted(total, 'GPU')}, not `gpus={gpus}`",
            hint="leave out `gpus`",
        )
    return total


@dataclass(frozen=True)
class MixedServers:
    """Equal servers, of which each kind of GPU fills some.

    Attributes:
        counts: of the GPUs, by kind, in the order of the servers.
        per_server: GPUs of a server.
        rates: of the links, by kind.
        compress: how activations are sent.
    """

    counts: Counts
    per_server: int
    rates: Mapping[str, Rates]
    compress: CodecName

    @classmethod
    def of(cls, counts: Counts, gpus: int | None, options: FitOptions) -> "MixedServers":
        """Return the servers that the options describe; where they do not, each kind has servers of
        its own, with the links that such GPUs usually have.

        Raises:
            ClusterError: for numbers or links that contradict each other.
        """
        if options.offload is not None:
            raise InputError(
                "`offload` has no price on several kinds of GPUs",
                hint="ask about one kind, or leave out `offload`",
            )

        counts = checked_counts(counts)
        total = counted_gpus(counts, gpus)
        number_of_gpus(total, options.servers, options.gpus_per_server)
        servers = number_of_servers(total, options.servers, options.gpus_per_server)
        if servers is None:
            alike = math.gcd(*counts.values())
            per_server = max(size for size in divisors(alike) if size <= PER_SERVER)
        else:
            per_server = total // servers

        _check_names(counts, options.bandwidth)
        rates = {}
        for kind in counts:
            given = rates_of(options.bandwidth, kind)
            if given:
                check_rates(given, total, total // per_server)
            rates[kind] = _complete(given, kind, per_server)

        return cls(counts, per_server, rates, options.compress)

    @property
    def gpus(self) -> int:
        """The GPUs of all kinds."""
        return sum(self.counts.values())

    def cluster_of(self, gpus: int, memory: int | str | None) -> Cluster:
        """Return so many GPUs, a multiple of all: each kind as many times as often."""
        times = gpus // self.gpus
        return self._cluster({kind: times * count for kind, count in self.counts.items()}, memory)

    def each_alone(self, memory: int | str | None) -> list[Cluster]:
        """Return the GPUs of each kind alone, the most first."""
        by_count = sorted(self.counts.items(), key=lambda item: -item[1])
        return [self._cluster({kind: count}, memory) for kind, count in by_count]

    def _cluster(self, counts: Counts, memory: int | str | None) -> Cluster:
        gpus = sum(counts.values())
        least = -(-gpus // self.per_server)
        servers = next(each for each in range(least, gpus + 1) if gpus % each == 0)
        if servers == 1:
            levels = [0]
        elif servers == gpus:
            levels = [1]
        else:
            levels = [0, 1]

        # The rate of a level is that of the slowest kind, to which the others' are ratios.
        own = {kind: [self.rates[kind][level] for level in levels] for kind in counts}
        columns = zip(*own.values(), strict=True)
        slowest = [min(column, key=_bytes_per_s) for column in columns]
        if len(levels) == 1:
            cluster = flat_cluster(gpus, slowest[0], memory)
        else:
            cluster = hierarchical_cluster((gpus // servers, servers), slowest, memory)

        kinds = tuple(
            DeviceKind(name=kind, count=count, link_ratios=_ratios(own[kind], slowest))
            for kind, count in counts.items()
        )
        return replace(cluster, kinds=kinds, compress=self.compress)


def _check_names(counts: Counts, bandwidth: object) -> None:
    """Raise ClusterError for rates of a kind that there is no GPU of."""
    for name in bandwidth if isinstance(bandwidth, Mapping) else ():
        if name not in counts:
            raise ClusterError(
                f"`bandwidth` has rates of {name}, and the GPUs are {', '.join(counts)}",
                hint="name the kinds as in `gpu`",
            )


def _complete(given: Sequence[float | str], kind: str, per_server: int) -> Rates:
    """Return the rates inside a server and between servers; the usual ones where none is given."""
    inside, between = usual_link(kind), usual_between(kind)
    if len(given) == 2:
        return given[0], given[1]
    if len(given) == 1:
        return (inside, given[0]) if per_server == 1 else (given[0], between)
    return inside, between


def _bytes_per_s(rate: float | str) -> float:
    return link_bandwidth(rate) if isinstance(rate, str) else rate


def _ratios(
    rates: Sequence[float | str], slowest: Sequence[float | str]
) -> tuple[float, ...] | None:
    """Return the ratios of rates to the levels'; None where all are 1."""
    ratios = tuple(
        _bytes_per_s(rate) / _bytes_per_s(level) for rate, level in zip(rates, slowest, strict=True)
    )
    return None if all(ratio == 1 for ratio in ratios) else ratios
