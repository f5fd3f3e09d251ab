"""The GPUs that `fit` asks about: equal servers, and the clusters that other numbers of such GPUs make."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import ClusterError
from planner.formats.cluster import Cluster, checked_gpus, flat_cluster, hierarchical_cluster
from planner.formats.link_names import usual_between, usual_link
from planner.formats.names import CodecName
from planner.options.cluster import listed
from planner.options.verbs import PER_SERVER, FitOptions
from planner.units import counted


@dataclass(frozen=True)
class Servers:
    """Equal servers.

    Attributes:
        gpus: in all of them.
        count: of servers.
        rates: of the links inside a server, and between servers; of the latter alone where servers have one GPU.
        compress: how activations are sent.
    """

    gpus: int
    count: int
    rates: Sequence[float | str]
    compress: CodecName

    @classmethod
    def of(cls, gpus: int, options: FitOptions) -> "Servers":
        """Return the servers that the options describe, with links that such GPUs usually have where they do not.

        Raise ClusterError for servers or links that contradict each other.
        """
        divisors = [count for count in range(1, checked_gpus(gpus) + 1) if gpus % count == 0]
        count = options.servers or next(count for count in divisors if gpus <= count * PER_SERVER)
        rates = listed(options.bandwidth)
        if rates and len(rates) != (2 if 1 < count != gpus else 1):
            raise ClusterError(
                f"`bandwidth` has {counted(len(rates), 'rate')} for {counted(count, 'server')}",
                hint="give one for GPUs in one server, or for servers of one GPU, else two, inside a server and "
                "between servers: nvlink4,100Gbps",
            )
        if count not in divisors:
            raise ClusterError(
                f"{counted(gpus, 'GPU')} are not divided evenly over {counted(count, 'server')}",
                hint=f"give `servers` as one of {', '.join(map(str, divisors))}",
            )

        usual: list[float | str] = [usual_link(options.gpu), usual_between(options.gpu)]
        if 1 < count == gpus:
            usual = usual[1:]
        return cls(gpus, count, rates + usual[len(rates) :], options.compress)

    @property
    def per_server(self) -> int:
        return self.gpus // self.count

    @property
    def joined_alike(self) -> bool:
        """Whether each server has one GPU, so that there are no links inside."""
        return 1 < self.count == self.gpus

    def cluster_of(self, gpus: int, memory: int | str | None) -> Cluster:
        """Return so many GPUs in as few servers of up to that size as hold equally many."""
        if self.joined_alike or gpus <= self.per_server:
            cluster = flat_cluster(gpus, self.rates[0], memory)
        else:
            least = -(-gpus // self.per_server)
            servers = next(each for each in range(least, gpus + 1) if gpus % each == 0)
            cluster = hierarchical_cluster([gpus // servers, servers], self.rates, memory)
        return cluster.model_copy(update={"compress": self.compress})
