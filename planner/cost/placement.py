"""What a plan costs on a cluster of several levels, where it matters which ranks a stage has.

The formulas are those of `cost`, with these links: a stage's all-reduce goes at the speed of the lowest level that
holds all its ranks; each transfer takes the time that its ends' places say (`topology`); and the links that the devices
of a server share are resources of their own. The published models know no places: there a cut is priced, for each of
its two stages, from the stage's farthest rank to the nearest one across the cut, and each device has links of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.cost.asynchronous import CostModel, Resource, cost_model
from planner.cost.synchronous import SynchronousModel
from planner.cost.topology import Loads, Topology, rank_ranges
from planner.cost.work import Floats, Work
from planner.formats.cluster import Cluster
from planner.formats.plan import CostModelName
from planner.schedule.schedule import Schedule

Exchanges = Mapping[tuple[int, int], Floats]  # by (source, target) stage, as `Loads.add_transfer` takes them


def places_matter(cluster: Cluster, schedule: Schedule) -> bool:
    """Whether a plan's price depends on which ranks its stages have."""
    return len(cluster.joined) > 1 and schedule.placed


@dataclass(frozen=True)
class Placement:
    """Stages on consecutive ranks of a cluster.

    Args:
        topology: of the cluster.
        works: of the stages, for one microbatch.
        replicas: of the stages.
        exchanges: between the stages, for one microbatch.
    """

    topology: Topology
    works: Sequence[Work]
    replicas: Sequence[int]
    exchanges: Exchanges

    @cached_property
    def ranks(self) -> list[range]:
        """Consecutive, in the order of the stages."""
        return rank_ranges(self.replicas)

    def asynchronous(self, model: CostModelName) -> list[dict[Resource, Floats]]:
        """Busy seconds per minibatch of every stage's resources, under 1f1b."""
        if model != "resource":
            return [self._published(model, stage) for stage in range(len(self.works))]
        loads, _ = self._transfers()
        for ranks, work in zip(self.ranks, self.works, strict=True):
            loads.add_ring(ranks, float(work.trainable_bytes))
        busy: list[dict[Resource, Floats]] = [
            {
                "compute": cost_model("resource", self.topology.stage_link(ranks)).resources_s(work, r)["compute"],
                "receive": np.asarray(loads.into[ranks.start : ranks.stop].max()),
                "send": np.asarray(loads.out[ranks.start : ranks.stop].max()),
            }
            for ranks, work, r in zip(self.ranks, self.works, self.replicas, strict=True)
        ]
        self._add_shared(busy, loads, 1)
        return busy

    def synchronous(self, model: SynchronousModel) -> tuple[list[float], list[dict[Resource, Floats]]]:
        """Each stage's part of the sum, and of the maximum by resource, under a schedule that drains."""
        loads, transfers_s = self._transfers()
        sums, busy = [], []
        for stage, (ranks, work, r) in enumerate(zip(self.ranks, self.works, self.replicas, strict=True)):
            placed = SynchronousModel(self.topology.stage_link(ranks), model.schedule, model.microbatches)
            alone = without_transfers(work)
            sums.append(float(placed.sum_s(alone, r)) + transfers_s[stage])
            resources = placed.resources_s(work, r)
            if model.schedule.pipelined:
                end_s = placed.end_s(work, r)
                more = (np.ceil(model.microbatches / r) - 1) * r
                resources["receive"] = more * np.max(loads.into[ranks.start : ranks.stop]) + end_s
                resources["send"] = more * np.max(loads.out[ranks.start : ranks.stop]) + end_s
            busy.append(resources)
        if model.schedule.pipelined:
            self._add_shared(busy, loads, model.microbatches - 1)
        return sums, busy

    def _transfers(self) -> tuple[Loads, list[float]]:
        """The loads of all transfers, and each stage's half of the time that one microbatch's take."""
        loads, halves = Loads(self.topology), [0.0] * len(self.works)
        for (source, target), exchange in self.exchanges.items():
            seconds = loads.add_transfer(self.ranks[source], self.ranks[target], exchange)
            halves[source] += seconds / 2
            halves[target] += seconds / 2
        return loads, halves

    def _add_shared(self, busy: list[dict[Resource, Floats]], loads: Loads, times: int) -> None:
        """The busiest shared link, as a resource of the stage that has most ranks on it."""
        seconds, first, end = loads.busiest_shared()
        if seconds > 0:
            inside = [len(range(max(ranks.start, first), min(ranks.stop, end))) for ranks in self.ranks]
            busy[inside.index(max(inside))]["shared_link"] = np.asarray(seconds * times)

    def _published(self, name: CostModelName, stage: int) -> dict[Resource, Floats]:
        ranks, work, r = self.ranks, self.works[stage], self.replicas[stage]

        def at(one: int, other: int) -> CostModel:
            return cost_model(name, self.topology.link(int(self.topology.level(one, other))))

        own = ranks[stage]
        busy: dict[Resource, Floats] = {"compute": at(own[0], own[-1]).resources_s(work, r)["compute"]}
        if stage > 0:
            busy["cut_before"] = at(own[0] - 1, own[-1]).resources_s(work, r)["cut_before"]
        if stage < len(ranks) - 1 and name == "pipedream":
            busy["cut_after"] = at(own[0], own[-1] + 1).resources_s(work, r)["cut_after"]
        return busy


def without_transfers(work: Work) -> Work:
    """The same computation, exchanging nothing."""
    nothing = np.zeros_like(work.received_bytes)
    return replace(work, received_bytes=nothing, sent_bytes=nothing, received_messages=nothing, sent_messages=nothing)
