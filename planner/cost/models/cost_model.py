"""What a cost model is: a plan goes in; the busy time of its resources and the microbatches it
holds come out.

Where the optimizer's state is sharded (ZeRO-1: Rajbhandari et al. 2020, sections 5.1 and 7.2.1), a
reduce-scatter and an all-gather after the update take the place of the all-reduce, which is made of
the same two halves. The reduce-scatter overlaps with the backward as the all-reduce does; nothing
hides the all-gather.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.candidate import Candidate
from planner.cost.layer_costs import LayerCosts, messages
from planner.cost.network.link import Link, backward_and_reduce_s, ring_all_reduce_s
from planner.cost.network.topology import (
    Busy,
    Placement,
    Resource,
    Topology,
    places_matter,
    ranks_of,
)
from planner.cost.setting import Setting
from planner.cost.work import Floats, Work
from planner.formats.plan_parts import Bottleneck


def reduce_s(work: Work, replicas: ArrayLike, link: Link) -> Floats:
    """Compute the seconds of a stage's all-reduce, or of the reduce-scatter where its optimizer is
    sharded.
    """
    whole_s = ring_all_reduce_s(work.trainable_bytes, replicas, link)
    if not np.any(work.sharded):
        return whole_s
    return np.where(work.sharded, whole_s / 2, whole_s)


def finish_s(work: Work, replicas: ArrayLike, link: Link) -> Floats:
    """Compute the seconds of the update, with the all-gather after it where the optimizer is
    sharded.
    """
    if not np.any(work.sharded):
        return work.update_s
    gather_s = ring_all_reduce_s(work.trainable_bytes, replicas, link) / 2
    return np.where(work.sharded, work.update_s / np.asarray(replicas) + gather_s, work.update_s)


def ending_s(
    work: Work, replicas: ArrayLike, microbatches: int, link: Link, filling_s: Floats | float = 0.0
) -> Floats:
    """Return the processor's seconds after the last backward: rest of the all-reduce, `filling_s`,
    and update.
    """
    last_s = work.last_backward_s(np.ceil(microbatches / np.asarray(replicas)))
    exposed_s = backward_and_reduce_s(last_s, reduce_s(work, replicas, link), link) - last_s
    return np.asarray(exposed_s + filling_s + finish_s(work, replicas, link))


def transfer_s(work: Work, link: Link) -> tuple[Floats, Floats]:
    """Return the seconds that one microbatch's messages keep a device's link busy, arriving and
    leaving.
    """
    return (
        work.received_bytes / link.bandwidth_bytes_per_s + work.received_messages * link.latency_s,
        work.sent_bytes / link.bandwidth_bytes_per_s + work.sent_messages * link.latency_s,
    )


@dataclass(frozen=True)
class UnpricedPlan:
    """A plan as a cost model gets it."""

    layer_costs: LayerCosts
    stages: Sequence[Candidate]
    setting: Setting

    @cached_property
    def works(self) -> list[Work]:
        return [self.layer_costs.work(stage) for stage in self.stages]

    @property
    def replicas(self) -> list[int]:
        return [stage.replicas for stage in self.stages]

    @cached_property
    def placement(self) -> Placement | None:
        """The ranks of the stages; None where it does not matter which they are."""
        cluster = self.setting.cluster
        if not places_matter(cluster):
            return None
        ranks = ranks_of(self.stages, self.setting.workers_of(len(self.stages)))
        exchanged = messages(self.layer_costs, self.stages)
        amounts = {
            ends: np.sum([each.amounts for each in values], axis=0)
            for ends, values in exchanged.items()
        }
        return Placement(Topology(cluster), self.works, ranks, amounts)


_SHOWN: dict[Resource, Literal["compute", "link", "shared_link"]] = {
    "compute": "compute",
    "receive": "link",
    "send": "link",
    "shared_link": "shared_link",
}


@dataclass(frozen=True)
class PlanTime:
    """The time of a plan for one minibatch."""

    busy: Sequence[Busy]  # for each stage; with several chunks per worker, for each worker
    # each stage's part of the time to fill and drain; empty if it never drains
    latency_s: Sequence[float] = ()

    @property
    def seconds(self) -> float:
        return self.busiest[2] + sum(self.latency_s)

    @property
    def busiest(self) -> tuple[int, Resource, float]:
        """Stage, resource and seconds of the busiest; ties go to the first resource, and there to
        the first stage.
        """
        found = [
            (index, name, float(each))
            for index, stage in enumerate(self.busy)
            for name, each in stage.items()
        ]
        return max(found, key=lambda item: (item[2], -get_args(Resource).index(item[1]), -item[0]))

    @property
    def bottleneck(self) -> Bottleneck:
        """The busiest resource, or the stage with the largest latency where no resource is busy
        beside that.
        """
        stage, resource, busy_s = self.busiest
        if busy_s <= 0 and self.latency_s:
            slowest = max(range(len(self.latency_s)), key=self.latency_s.__getitem__)
            return Bottleneck(stage=slowest, resource="compute", busy_s=self.latency_s[slowest])
        return Bottleneck(stage=stage, resource=_SHOWN[resource], busy_s=busy_s)


class Held(NamedTuple):
    """What a replica of each stage holds at most."""

    in_flight: tuple[int, ...]  # microbatches between forward and backward
    saved: tuple[int, ...]  # activations in memory, in those of one microbatch


class CostModel(ABC):
    """The time and memory of plans. `planner.cost.pricing.cost_model_of` finds the one for a
    setting.
    """

    @abstractmethod
    def time(self, plan: UnpricedPlan) -> PlanTime:
        """Compute the time of a plan."""

    def held(self, plan: UnpricedPlan) -> Held:
        """Return what each stage's replicas hold in flight."""
        setting = plan.setting
        depths = setting.schedule.depths(plan.replicas, setting.microbatches, setting.chunks)
        return Held(depths, depths)


class StageModel(CostModel):
    """A cost model that prices each stage by itself: the busiest resource of any sets the pace, in
    the steady state.
    """

    def __init__(self, link: Link) -> None:
        self.link = link

    @abstractmethod
    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """Compute the busy seconds per minibatch of each resource of stages on `replicas`
        workers.
        """

    def stage_s(self, work: Work, replicas: ArrayLike) -> Floats:
        """Compute the seconds of each stage's busiest resource."""
        return reduce(np.maximum, self.resources_s(work, replicas).values())

    def time(self, plan: UnpricedPlan) -> PlanTime:
        """See base class."""
        if plan.placement is not None:
            return PlanTime(self.placed_s(plan.placement))
        return PlanTime(
            [self.resources_s(work, r) for work, r in zip(plan.works, plan.replicas, strict=True)]
        )

    def placed_s(self, placement: Placement) -> list[Busy]:
        """Compute the busy seconds of each stage's resources on the ranks of a cluster with several
        levels.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no places")
