"""Equal servers of GPUs, as people count them, and the clusters that other numbers of such GPUs
make.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.cost.offload import optimizer_offload
from planner.errors import ClusterError, InputError
from planner.formats.cluster import (
    Cluster,
    OptimizerOffload,
    checked_gpus,
    flat_cluster,
    hierarchical_cluster,
    load_cluster,
)
from planner.formats.files import replace
from planner.formats.link_names import (
    link_bandwidth,
    names_link,
    usual_between,
    usual_host_link,
    usual_link,
)
from planner.formats.names import CodecName
from planner.options.cluster import ClusterOptions, listed
from planner.options.option import refuse
from planner.options.verbs import PER_SERVER, FitOptions
from planner.units import counted


def number_of_gpus(
    gpus: int | None,
    servers: int | None,
    gpus_per_server: int | None,
) -> int | None:
    """Return the GPUs in all servers; None where they were not said.

    Raises:
        ClusterError: where they were said twice, differently.
    """
    if gpus_per_server is None:
        return gpus

    count = checked_gpus(gpus_per_server * (servers or 1))
    if gpus is not None and servers is None:
        count = gpus  # their number follows
    if gpus is not None and gpus != count:
        raise ClusterError(
            f"{counted(servers or 1, 'server')} of {counted(gpus_per_server, 'GPU')} are "
            f"{counted(count, 'GPU')}, "
            f"not `gpus={gpus}`",
            hint="leave out `gpus`",
        )

    return count


def number_of_servers(gpus: int, servers: int | None, gpus_per_server: int | None) -> int | None:
    """Return how many servers have these GPUs; None where that was not said.

    Raises:
        ClusterError: where they do not have equally many.
    """
    if servers is None and gpus_per_server is not None:
        if gpus % gpus_per_server:
            raise ClusterError(
                f"{counted(gpus, 'GPU')} are not servers of {counted(gpus_per_server, 'GPU')} each",
                hint="give `gpus_per_server` and `servers` alone",
            )
        return gpus // gpus_per_server

    if servers is not None and checked_gpus(gpus) % servers:
        raise ClusterError(
            f"{counted(gpus, 'GPU')} do not split evenly over {counted(servers, 'server')}",
            hint=f"give `servers` as one of {', '.join(map(str, divisors(gpus)))}",
        )

    return servers


def count_gpus(gpus: int | None, options: FitOptions) -> tuple[int | None, FitOptions]:
    """Return how many GPUs there are, None where the options leave it to the kinds of GPUs or to a
    trainer's file, and the options with servers in place of a topology.

    Raises:
        ClusterError: where GPUs were said twice, differently, and for servers in racks.
        InputError: for a topology or a file of the cluster beside servers.
    """
    if options.cluster is not None:
        refuse(options, "cluster", "servers", "gpus_per_server", "topology", "bandwidth")
        return _gpus_of_file(gpus, options), options

    if options.topology is not None:
        refuse(options, "topology", "servers", "gpus_per_server")
        per_server, *above = (int(size) for size in options.topology)
        if len(above) > 1:
            named = "x".join(map(str, options.topology))
            raise ClusterError(
                f"`topology={named}` has {len(above) + 1} levels, and `plan fit` knows servers and "
                f"the GPUs in them",
                hint=f"give `topology={per_server}x{math.prod(above)}`, then solve with the racks "
                f"and the profile.json that this leaves",
            )
        (servers,) = above or (1,)
        options = replace(options, topology=None, servers=servers, gpus_per_server=per_server)

    if isinstance(options.gpu, Mapping):
        return gpus, options
    return number_of_gpus(gpus, options.servers, options.gpus_per_server), options


def _gpus_of_file(gpus: int | None, options: FitOptions) -> int:
    """Return the GPUs of the file that describes the cluster; raise ClusterError where it is not
    one that such a question can be about.
    """
    assert options.cluster is not None
    read = load_cluster(options.cluster)
    if len(read.levels) > 2:
        raise ClusterError(
            f"`cluster={options.cluster}` has {len(read.levels)} levels, and `plan fit` knows "
            f"servers and the GPUs in them",
            hint="solve with it and the profile.json that an answer without it leaves",
        )
    if read.kinds or isinstance(options.gpu, Mapping):
        raise ClusterError(
            "`cluster` is for GPUs of one kind",
            hint="give the links of each kind: `bandwidth=v100=nvlink2,10Gbps,t4=4GB/s,10Gbps`",
        )
    if gpus not in (None, read.gpus):
        raise ClusterError(
            f"`cluster={options.cluster}` has {counted(read.gpus, 'GPU')}, not `gpus={gpus}`",
            hint="leave out `gpus`",
        )
    return read.gpus


def divisors(gpus: int) -> list[int]:
    """Return the numbers of servers that can have equally many of the GPUs."""
    return [count for count in range(1, gpus + 1) if gpus % count == 0]


def check_rates(rates: Sequence[float | str], gpus: int, servers: int) -> None:
    """Raise ClusterError unless there are rates for the links inside servers and for those between
    them.
    """
    if len(rates) != (2 if 1 < servers < gpus else 1):
        raise ClusterError(
            f"`bandwidth` has {counted(len(rates), 'rate')} for {counted(servers, 'server')}",
            hint="give one for GPUs in one server, or for servers of one GPU, else two, inside a "
            "server and "
            "between servers: pcie4,10Gbps",
        )


def offload_of(
    options: FitOptions | ClusterOptions, gpu: str, gpus_per_server: int
) -> OptimizerOffload | None:
    """Return how the options offload the optimizer of so many GPUs in each server; None where they
    do not.

    Args:
        gpu: the kind of GPU, whose usual link to the host counts where the options say none.
    """
    if options.offload is None:
        if options.host_bandwidth is not None:
            raise InputError(
                f"`host_bandwidth={options.host_bandwidth}` is of a link that nothing crosses",
                hint="give `offload=optimizer`, too, or leave it out",
            )
        return None

    rate = options.host_bandwidth
    if rate is None:
        rate = usual_host_link(gpu)
    if isinstance(rate, str):
        rate = link_bandwidth(rate)
    return optimizer_offload(rate, gpus_per_server)


def too_fast_words(gpu: str, rate: float | str) -> str:
    """Say that GPUs of a kind do not reach each other by the link that a name stands for; "" where
    they do.
    """
    usual = usual_link(gpu)
    if not names_link(rate) or names_link(usual):
        return ""
    return (
        f"`bandwidth={rate}` is what GPUs have that reach each other directly, and the driver of "
        f"{gpu} does not let them: what they send passes the host's memory, at about {usual}"
    )


@dataclass(frozen=True)
class Servers:
    """Equal servers.

    Attributes:
        gpus: in all of them.
        count: of servers.
        rates: of the links inside a server, and between servers; of the latter alone where servers
            have one GPU.
        compress: how activations are sent.
        offload: of the optimizer, where the memory of the host has it.
        measured: the cluster of a file, whose links these are; None where rates describe them.
    """

    gpus: int
    count: int
    rates: Sequence[float | str]
    compress: CodecName
    offload: OptimizerOffload | None = None
    measured: Cluster | None = None

    @classmethod
    def of(cls, gpus: int, options: FitOptions) -> "Servers":
        """Return the servers that the options describe, with links that such GPUs usually have
        where they do not.

        Raise ClusterError for servers or links that contradict each other.
        """
        if options.cluster is not None:
            return cls._of_file(load_cluster(options.cluster), options)

        checked_gpus(gpus)
        number_of_gpus(gpus, options.servers, options.gpus_per_server)
        count = number_of_servers(gpus, options.servers, options.gpus_per_server)
        if count is None:
            count = next(each for each in divisors(gpus) if gpus <= each * PER_SERVER)
        gpu = str(options.gpu)
        if isinstance(options.bandwidth, Mapping):
            raise ClusterError(
                f"`bandwidth` has rates of kinds of GPUs, and all GPUs are {gpu}",
                hint="give one rate per level: pcie4,10Gbps",
            )

        rates = listed(options.bandwidth)
        usual: list[float | str] = [usual_link(gpu), usual_between(gpu)]
        if 1 < count == gpus:
            usual = usual[1:]
        if 1 < count < gpus and len(rates) == 1 and not names_link(rates[0]):
            rates = [usual[0], *rates]  # that of a network; a name would be of links inside

        if rates:
            check_rates(rates, gpus, count)
        offload = offload_of(options, gpu, gpus // count)
        return cls(gpus, count, rates + usual[len(rates) :], options.compress, offload)

    @classmethod
    def _of_file(cls, read: Cluster, options: FitOptions) -> "Servers":
        count = read.levels[1].size if len(read.levels) > 1 else 1
        gpu = str(options.gpu)
        measured = [level.bandwidth_bytes_per_s for level in read.levels]
        usual = [usual_link(gpu), usual_between(gpu)]  # where more servers are tried than one
        offload = offload_of(options, gpu, read.gpus // count)
        rates: list[float | str] = [*measured, *usual[len(measured) :]]
        return cls(read.gpus, count, rates, options.compress, offload, read)

    @property
    def per_server(self) -> int:
        return self.gpus // self.count

    @property
    def joined_alike(self) -> bool:
        """Whether each server has one GPU, so that there are no links inside."""
        return 1 < self.count == self.gpus

    def cluster_of(self, gpus: int, memory: int | str | None) -> Cluster:
        """Return so many GPUs in as few servers of up to that size as hold equally many."""
        sizes = [gpus]
        if not self.joined_alike and gpus > self.per_server:
            least = -(-gpus // self.per_server)
            servers = next(each for each in range(least, gpus + 1) if gpus % each == 0)
            sizes = [gpus // servers, servers]

        if len(sizes) > 1:
            cluster = hierarchical_cluster(sizes, self.rates, memory)
        else:
            cluster = flat_cluster(gpus, self.rates[0], memory)
        if self.measured is not None:
            cluster = _with_links_of(self.measured, cluster)
        return replace(cluster, compress=self.compress, offload=self.offload)


def _with_links_of(measured: Cluster, cluster: Cluster) -> Cluster:
    """Return a cluster with the links of a measured one, on as many levels as that has."""
    known = [
        replace(level, size=other.size)
        for level, other in zip(measured.levels, cluster.levels, strict=False)
    ]
    levels = (*known, *cluster.levels[len(known) :])
    return replace(measured, levels=levels, memory_bytes=cluster.memory_bytes)
