"""The time and memory of synchronous schedules, which drain the pipeline after every minibatch."""

import numpy as np
from numpy.typing import ArrayLike

from planner.cost.communicators import reserves_of
from planner.cost.models.cost_model import (
    CostModel,
    Held,
    PlanTime,
    UnpricedPlan,
    ending_s,
    transfer_s,
)
from planner.cost.network.link import Link
from planner.cost.network.topology import Busy, Placement
from planner.cost.work import WEIGHT_SHARE, Floats, Integers, Work, stacked
from planner.schedule.schedule import Schedule


class SynchronousModel(CostModel):
    """A pipeline that drains after every minibatch of m microbatches (gpipe, 1f1b-flush, zb-h1).

        Σ_s latency_s + max_s ( (ceil(m/r_s) - 1)·busy_s + max(0, AR_s - Bw_s) + U_s )

    latency_s: forward, recomputation, backward and the transfers into the stage, both ways, of the first microbatch.
    busy_s: the busiest of a replica's processor and of its link each way, for one of the other microbatches, whose
    gradients the processor accumulates.

    With one replica each this is the Σ + (m-1)·max of GPipe (Huang et al. 2019, section 2.3), plus the update and the
    rest of the all-reduce. Under zb-h1 the weights' part W of the backward fills the bubble, except for one stage's at
    the end: 2W less in every latency and 2W more in the end give the published bubble (K-1)·(F + Bw - 2W) (Qi et al.
    2024, section 2).
    """

    def __init__(self, link: Link, schedule: Schedule, microbatches: int) -> None:
        assert schedule.formula == "synchronous"
        self.link, self.schedule, self.microbatches = link, schedule, microbatches

    def time(self, plan: UnpricedPlan) -> PlanTime:
        if plan.placement is not None:
            return self._placed_time(plan.placement)
        stages = list(zip(plan.works, plan.replicas, strict=True))
        latency_s = [float(self.sum_s(work)) for work in plan.works]
        return PlanTime([self.resources_s(work, r) for work, r in stages], latency_s)

    def _placed_time(self, placement: Placement) -> PlanTime:
        loads, transfers_s = placement.transfers()
        latency_s, busy = np.array(transfers_s), list[Busy]([{}] * len(transfers_s))
        works, replicas = stacked(placement.works), np.array(list(map(len, placement.ranks)))
        spans = np.array([placement.topology.span(ranks) for ranks in placement.ranks])
        for span in np.unique(spans):  # stages with links alike at once: searches price many plans of many stages
            rows = np.flatnonzero(spans == span)
            link = placement.topology.stage_link(placement.ranks[int(rows[0])])
            placed = SynchronousModel(link, self.schedule, self.microbatches)
            work, r = works.rows(rows), replicas[rows]
            latency_s[rows] += placed.sum_s(work.without_transfers())
            resources = placed.resources_s(work, r)
            end_s = placed.end_s(work, r)
            more = (np.ceil(self.microbatches / r) - 1) * r
            receive_s, send_s = np.array([loads.busiest(placement.ranks[row]) for row in rows.tolist()]).T
            resources["receive"], resources["send"] = more * receive_s + end_s, more * send_s + end_s
            for place, row in enumerate(rows):
                busy[row] = {name: np.asarray(seconds[place]) for name, seconds in resources.items()}
        placement.add_shared(busy, loads, self.microbatches - 1)
        return PlanTime(busy, latency_s.tolist())

    def held(self, plan: UnpricedPlan) -> Held:
        held = super().held(plan)
        # Under zb-h1 the weights' part of as many backwards waits as bring a stage to what the first one has in flight,
        # if memory allows it: each keeps its saved activations and gradients that are about as large.
        if not self.schedule.splits_backward:
            return held
        waiting = np.array([self._waiting(plan, stage, held.in_flight) for stage in range(len(plan.stages))])
        flying = np.array(held.in_flight)
        return Held(tuple((flying + waiting).tolist()), tuple((flying + 2 * waiting).tolist()))

    def _waiting(self, plan: UnpricedPlan, number: int, in_flight: tuple[int, ...]) -> int:
        stage, traffic = plan.stages[number], plan.layer_costs.traffic
        arriving = (t for t in traffic if t.producer in stage.before and stage.layers.intersection(t.users))
        if not any(value.gradient_bytes for value in arriving):
            return 0  # no earlier stage waits for gradients
        flying = in_flight[number]
        more = max(0, min(in_flight[0], -(-self.microbatches // stage.replicas)) - flying)
        if (limit := plan.setting.cluster.memory_of(stage.options.kind)) is not None:
            footprint = plan.layer_costs.footprint(stage).divided(self.microbatches)
            room = reserves_of(plan.layer_costs, plan.stages)[number].room(limit)
            fit = footprint.most_in_flight(room, stashing=False)
            more = max(0, min(more, (int(fit) - flying) // 2))
        return more

    def sum_s(self, work: Work) -> Floats:
        # A transfer counts half at each of its ends, once in the sum over the stages.
        moved_bytes, messages = work.received_bytes + work.sent_bytes, work.received_messages + work.sent_messages
        transfer_s = (moved_bytes / self.link.bandwidth_bytes_per_s + messages * self.link.latency_s) / 2
        return work.forward_s + work.recompute_s + (work.backward_s - self._filling_s(work)) + transfer_s

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """Compute each stage's part of the maximum, by resource."""
        r = np.asarray(replicas, dtype=np.float64)
        more = np.ceil(self.microbatches / r) - 1
        end_s = self.end_s(work, r)
        handling_s = self.link.handling_s(work.received_bytes + work.sent_bytes)
        receive_s, send_s = transfer_s(work, self.link)
        once_s = work.forward_s + work.recompute_s + work.backward_s
        return {
            "compute": more * (once_s + work.accumulate_s + handling_s) + end_s,
            "receive": more * receive_s + end_s,
            "send": more * send_s + end_s,
        }

    def end_s(self, work: Work, replicas: ArrayLike) -> Floats:
        """Compute the seconds after the last backward: the rest of the all-reduce, and the update."""
        return ending_s(work, replicas, self.microbatches, self.link, self._filling_s(work))

    def _filling_s(self, work: Work) -> Floats:
        share = 2 * WEIGHT_SHARE if self.schedule.splits_backward else 0.0
        return np.asarray(share * work.backward_s)

    def max_s(self, work: Work, replicas: ArrayLike) -> Floats:
        return np.asarray(np.max(np.stack(np.broadcast_arrays(*self.resources_s(work, replicas).values())), axis=0))

    def in_flight(self, replicas: ArrayLike, gpus_after: ArrayLike) -> Integers:
        r, after = np.asarray(replicas, dtype=np.int64), np.asarray(gpus_after, dtype=np.int64)
        return self.schedule.in_flight(r, after, self.microbatches)
