"""The places of a plan's stages on a cluster of several levels, and how busy its transfers keep the links there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.cost.candidate import Candidate
from planner.cost.network.topology import Loads, Ranks, Topology, rank_ranges
from planner.cost.work import Floats, Work
from planner.formats.cluster import Cluster

Resource = Literal["compute", "receive", "send", "shared_link", "cut_before", "cut_after"]
Busy = dict[Resource, Floats]  # seconds per minibatch
Exchanges = Mapping[tuple[int, int], Floats]  # by (source, target) stage, as `Loads.add_transfer` takes them


def places_matter(cluster: Cluster) -> bool:
    return len(cluster.joined) > 1


def ranks_of(stages: Sequence[Candidate], workers: Sequence[int]) -> list[Ranks]:
    """Return the ranks of each stage: its own, or consecutive ones in the order of the pipeline's workers."""
    replicas = {worker: stage.replicas for worker, stage in zip(workers, stages, strict=True)}
    ranges = rank_ranges([replicas[worker] for worker in sorted(replicas)])
    return [stage.ranks or ranges[worker] for worker, stage in zip(workers, stages, strict=True)]


@dataclass(frozen=True)
class Placement:
    """Stages on ranks of a cluster; work and exchanges are those of one microbatch."""

    topology: Topology
    works: Sequence[Work]
    ranks: Sequence[Ranks]
    exchanges: Exchanges

    @property
    def replicas(self) -> list[int]:
        return [len(ranks) for ranks in self.ranks]

    def transfers(self) -> tuple[Loads, list[float]]:
        """Return the loads of all transfers, and each stage's half of the time that one microbatch's take."""
        loads, halves = Loads(self.topology), [0.0] * len(self.works)
        for (source, target), exchange in self.exchanges.items():
            if self.ranks[source] == self.ranks[target]:
                continue  # stages of the same workers pass values on without a message
            seconds = loads.add_transfer(self.ranks[source], self.ranks[target], exchange)
            halves[source] += seconds / 2
            halves[target] += seconds / 2
        return loads, halves

    def add_shared(self, busy: Sequence[Busy], loads: Loads, times: int) -> None:
        """Add the busiest shared link, as a resource of the stage that has most ranks on it."""
        seconds, first, end = loads.busiest_shared()
        if seconds > 0:
            inside = [sum(first <= rank < end for rank in ranks) for ranks in self.ranks]
            busy[inside.index(max(inside))]["shared_link"] = np.asarray(seconds * times)
