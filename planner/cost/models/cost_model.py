"""What a cost model is: a plan goes in; the busy time of its resources and the microbatches it holds come out.

At the end of a round, the replicas of a stage sum their gradients, update, and exchange the weights. Where the
optimizer's state is sharded (ZeRO-1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, sections 5.1 and 7.2.1), a reduce-scatter leaves each of r replicas the sums of its part, it
updates that part, and an all-gather gives everybody all weights. Both together move the bytes of a ring all-reduce, in
as many steps, because that is made of the same two halves. The reduce-scatter overlaps with the backward as the
all-reduce does; nothing hides the all-gather.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts, exchanges
from planner.cost.network.link import Link, backward_and_reduce_s, link_of, ring_all_reduce_s
from planner.cost.network.placement import Busy, Placement, Resource, places_matter, ranks_of
from planner.cost.network.topology import Topology
from planner.cost.setting import Setting
from planner.cost.work import Floats, Work
from planner.formats.plan_parts import Bottleneck


def reduce_s(work: Work, replicas: ArrayLike, link: Link) -> Floats:
    """Return the seconds of the all-reduce, or of the reduce-scatter of stages whose optimizer is sharded."""
    whole_s = ring_all_reduce_s(work.trainable_bytes, replicas, link)
    return np.where(work.sharded, whole_s / 2, whole_s) if np.any(work.sharded) else whole_s


def finish_s(work: Work, replicas: ArrayLike, link: Link) -> Floats:
    """Return the seconds of a replica's update, and of the all-gather that follows where the optimizer is sharded."""
    if not np.any(work.sharded):
        return work.update_s
    gather_s = ring_all_reduce_s(work.trainable_bytes, replicas, link) / 2
    return np.where(work.sharded, work.update_s / np.asarray(replicas) + gather_s, work.update_s)


def ending_s(work: Work, replicas: ArrayLike, microbatches: int, link: Link, filling_s: Floats | float = 0.0) -> Floats:
    """Return the processor's seconds after the last of the microbatches' backwards.

    They are the rest of the all-reduce, what of the backward filled the bubble before, and the update.
    """
    last_s = work.last_backward_s(np.ceil(microbatches / np.asarray(replicas)))
    exposed_s = backward_and_reduce_s(last_s, reduce_s(work, replicas, link), link) - last_s
    return np.asarray(exposed_s + filling_s + finish_s(work, replicas, link))


def transfer_s(work: Work, link: Link) -> tuple[Floats, Floats]:
    """Return the seconds that one microbatch's messages keep a device's link busy, arriving and leaving."""
    return (
        work.received_bytes / link.bandwidth_bytes_per_s + work.received_messages * link.latency_s,
        work.sent_bytes / link.bandwidth_bytes_per_s + work.sent_messages * link.latency_s,
    )


@dataclass(frozen=True)
class UnpricedPlan:
    """A plan as a cost model gets it: the costs of layers, the stages that they form, and what the plan is for."""

    layer_costs: LayerCosts
    stages: Sequence[Candidate]
    setting: Setting

    @cached_property
    def works(self) -> list[Work]:
        """Each stage's work for one microbatch."""
        return [self.layer_costs.work(stage) for stage in self.stages]

    @property
    def replicas(self) -> list[int]:
        """Each stage's replicas."""
        return [stage.replicas for stage in self.stages]

    @cached_property
    def placement(self) -> Placement | None:
        """The ranks of the stages; None where it does not matter which they are."""
        cluster, schedule = self.setting.cluster, self.setting.schedule
        if not places_matter(cluster):
            return None
        workers = len(self.stages) // self.setting.chunks
        ranks = ranks_of(self.stages, [schedule.worker_of(stage, workers) for stage in range(len(self.stages))])
        return Placement(Topology(cluster), self.works, ranks, exchanges(self.layer_costs, self.stages))

    @property
    def depths(self) -> tuple[int, ...]:
        """Microbatches in flight on a replica of each stage, by the schedule."""
        return self.setting.schedule.depths(self.replicas, self.setting.microbatches, self.setting.chunks)


@dataclass(frozen=True)
class PlanTime:
    """The time of a plan for one minibatch."""

    busy: Sequence[Busy]  # for each stage; with several chunks per worker, for each worker
    latency_s: Sequence[float] = ()  # each stage's part of the time to fill and drain; empty if it never drains

    @property
    def seconds(self) -> float:
        """Seconds per minibatch."""
        return self.busiest[2] + sum(self.latency_s)

    @property
    def busiest(self) -> tuple[int, Resource, float]:
        """Stage, resource and seconds of the busiest; ties go to compute, which stands first in every model."""
        rank = {name: -index for index, name in enumerate(get_args(Resource))}
        return max(
            ((index, name, float(busy_s)) for index, stage in enumerate(self.busy) for name, busy_s in stage.items()),
            key=lambda item: (item[2], rank[item[1]], -item[0]),
        )

    @property
    def bottleneck(self) -> Bottleneck:
        """The busiest resource, or the stage with the largest latency where no resource is busy beside that."""
        stage, resource, busy_s = self.busiest
        if busy_s <= 0 and self.latency_s:
            slowest = max(range(len(self.latency_s)), key=self.latency_s.__getitem__)
            return Bottleneck(stage=slowest, resource="compute", busy_s=self.latency_s[slowest])
        match resource:
            case "compute" | "shared_link":
                return Bottleneck(stage=stage, resource=resource, busy_s=busy_s)
            case "receive" | "send":
                return Bottleneck(stage=stage, resource="link", busy_s=busy_s)
            case _:
                return Bottleneck(stage=stage - (resource == "cut_before"), resource="boundary", busy_s=busy_s)


class Held(NamedTuple):
    """What a replica of each stage holds at most."""

    in_flight: tuple[int, ...]  # microbatches between forward and backward
    saved: tuple[int, ...]  # activations in memory, in those of one microbatch


class CostModel(ABC):
    """The time and memory of plans. Implementations are found through `planner.cost.pricing`."""

    @classmethod
    @abstractmethod
    def of(cls, setting: Setting) -> CostModel:
        """Return the cost model for plans in this setting."""

    @abstractmethod
    def time(self, plan: UnpricedPlan) -> PlanTime:
        """Compute the time of a plan."""

    def held(self, plan: UnpricedPlan) -> Held:
        """Count the microbatches that a plan's stages hold."""
        return Held(plan.depths, plan.depths)


class StageModel(CostModel):
    """A cost model under which the time of a plan is the busiest resource of any stage, in the steady state.

    Each stage is priced by itself, from its `Work` (seconds and bytes per microbatch, before replication), so that one
    call prices one stage or thousands. `link`: of every device.
    """

    def __init__(self, link: Link) -> None:
        self.link = link

    @classmethod
    def of(cls, setting: Setting) -> StageModel:
        return cls(link_of(setting.cluster))

    @abstractmethod
    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """Compute the busy seconds per minibatch of each resource of stages on `replicas` workers."""

    def stage_s(self, work: Work, replicas: ArrayLike) -> Floats:
        """Compute the seconds per minibatch of stages: those of the busiest resource."""
        first, *others = self.resources_s(work, replicas).values()
        for other in others:
            first = np.maximum(first, other)
        return first

    def time(self, plan: UnpricedPlan) -> PlanTime:
        if plan.placement is not None:
            return PlanTime(self.placed_s(plan.placement))
        return PlanTime([self.resources_s(work, r) for work, r in zip(plan.works, plan.replicas, strict=True)])

    def placed_s(self, placement: Placement) -> list[Busy]:
        """Compute the busy seconds of every stage's resources where it matters which ranks the stages have."""
        raise NotImplementedError(f"{type(self).__name__} knows no places")
