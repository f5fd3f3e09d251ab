"""The time and memory of synchronous schedules, which drain the pipeline after every minibatch."""

from collections.abc import Sequence

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
from planner.cost.traffic import arriving
from planner.cost.work import Floats, Integers, Work, stacked
from planner.schedule.schedule import Schedule


class SynchronousModel(CostModel):
    """A pipeline that drains after every minibatch of m microbatches (gpipe, 1f1b-flush, zb-h1).

        Σ_s latency_s + max_s ( (ceil(m/r_s) - 1)·busy_s + max(0, AR_s - Bw_s) + U_s )

        latency_s   forward, recomputation, backward and transfers into the stage, both ways, of the
                    first microbatch
        busy_s      the busiest of a replica's processor and its link each way, for one of the other
                    microbatches, whose gradients the processor accumulates
        r_s         replicas
        AR_s, Bw_s  seconds of the all-reduce, and of the last backward
        U_s         seconds of the update

    With one replica each this is the Σ + (m-1)·max of GPipe (Huang et al. 2019, section 2.3), plus
    the update and the rest of the all-reduce. Under zb-h1 the weights' part W of the backward fills
    the bubble, except for one stage's at the end: 2W less in every latency and 2W more in the end
    give the published bubble (K-1)·(F + Bw - 2W) (Qi et al. 2024, section 2).
    """

    def __init__(self, link: Link, schedule: Schedule, microbatches: int) -> None:
        assert schedule.formula in ("synchronous", None)
        self.link = link
        self.schedule = schedule
        self.microbatches = microbatches

    def time(self, plan: UnpricedPlan) -> PlanTime:
        """See base class."""
        if plan.placement is not None:
            return self._placed_time(plan.placement)
        return PlanTime(
            [self.resources_s(*each) for each in zip(plan.works, plan.replicas, strict=True)],
            [float(self.sum_s(work)) for work in plan.works],
        )

    def _placed_time(self, placement: Placement) -> PlanTime:
        """Compute the time of a plan on the ranks of a cluster with several levels."""
        loads, transfers_s = placement.transfers()
        works = stacked(placement.works)
        replicas = np.array([len(ranks) for ranks in placement.ranks])
        # Seconds of one microbatch's messages per stage, each way.
        moving_s = np.array([loads.busiest(ranks) for ranks in placement.ranks])
        latency_s = np.array(transfers_s)
        busy: list[Busy] = [{} for _ in transfers_s]

        # Searches price many plans of many stages: those with links alike at once.
        for rows in _with_links_alike(placement):
            link = placement.topology.stage_link(placement.ranks[rows[0]])
            model = SynchronousModel(link, self.schedule, self.microbatches)
            work = works.rows(rows)

            latency_s[rows] += model.sum_s(work.without_transfers())
            seconds = model._placed_s(work, replicas[rows], moving_s[rows])
            for name, each_s in seconds.items():
                for row, stage_s in zip(rows, each_s, strict=True):
                    busy[row][name] = np.asarray(stage_s)

        placement.add_shared(busy, loads, self.microbatches - 1)
        return PlanTime(busy, latency_s.tolist())

    def _placed_s(self, work: Work, replicas: Integers, moving_s: Floats) -> Busy:
        """Compute `resources_s` with the links as busy as they are: `moving_s`, (stages, ways)."""
        seconds = self.resources_s(work, replicas)
        end_s = self.end_s(work, replicas)
        # The links carry the messages of all replicas.
        others = (np.ceil(self.microbatches / replicas) - 1) * replicas
        seconds["receive"] = others * moving_s[:, 0] + end_s
        seconds["send"] = others * moving_s[:, 1] + end_s
        return seconds

    def held(self, plan: UnpricedPlan) -> Held:
        """Return what replicas hold.

        Under zb-h1 the weights' part of as many backwards waits as bring a stage to what the first
        one has in flight, if memory allows it: each keeps its saved activations, and gradients that
        are about as large.
        """
        held = super().held(plan)
        if not self.schedule.splits_backward:
            return held
        waiting = [self._waiting(plan, stage, held.in_flight) for stage in range(len(plan.stages))]
        pairs = list(zip(held.in_flight, waiting, strict=True))
        return Held(
            in_flight=tuple(flying + more for flying, more in pairs),
            saved=tuple(flying + 2 * more for flying, more in pairs),
        )

    def _waiting(self, plan: UnpricedPlan, number: int, in_flight: Sequence[int]) -> int:
        """Return how many backwards of a stage wait for their weights' part."""
        stage = plan.stages[number]
        received = arriving(plan.layer_costs.traffic, stage)
        if not any(value.gradient_bytes for value in received):
            return 0  # no earlier stage waits for gradients

        flying = in_flight[number]
        share = -(-self.microbatches // stage.replicas)
        more = min(in_flight[0], share) - flying

        memory_bytes = plan.setting.cluster.memory_of(stage.options.kind)
        if memory_bytes is not None:
            footprint = plan.layer_costs.footprint(stage).divided(self.microbatches)
            room_bytes = reserves_of(plan.layer_costs, plan.stages)[number].room(memory_bytes)
            fitting = int(footprint.most_in_flight(room_bytes, stashing=False))
            more = min(more, (fitting - flying) // 2)

        return max(0, more)

    def sum_s(self, work: Work) -> Floats:
        """Compute each stage's part of the sum."""
        # A transfer counts half at each of its ends, once in the sum over the stages.
        moved_bytes = work.received_bytes + work.sent_bytes
        messages = work.received_messages + work.sent_messages
        moving_s = moved_bytes / self.link.bandwidth_bytes_per_s + messages * self.link.latency_s
        backward_s = work.backward_s - self._filling_s(work)
        return work.forward_s + work.recompute_s + backward_s + moving_s / 2

    def resources_s(self, work: Work, replicas: ArrayLike) -> Busy:
        """Compute each stage's part of the maximum, by resource."""
        r = np.asarray(replicas, dtype=np.float64)
        others = np.ceil(self.microbatches / r) - 1
        end_s = self.end_s(work, r)

        handling_s = self.link.handling_s(work.received_bytes + work.sent_bytes)
        once_s = work.forward_s + work.recompute_s + work.backward_s
        receive_s, send_s = transfer_s(work, self.link)
        return {
            "compute": others * (once_s + work.accumulate_s + handling_s) + end_s,
            "receive": others * receive_s + end_s,
            "send": others * send_s + end_s,
        }

    def end_s(self, work: Work, replicas: ArrayLike) -> Floats:
        """Compute the seconds after the last backward: rest of the all-reduce, and update."""
        return ending_s(work, replicas, self.microbatches, self.link, self._filling_s(work))

    def _filling_s(self, work: Work) -> Floats:
        """Return the seconds of a backward that fill the bubble: 2W, and no more than all of it."""
        if not self.schedule.splits_backward:
            return np.zeros_like(work.backward_s)
        return np.minimum(2 * work.backward_weight_s, work.backward_s)

    def max_s(self, work: Work, replicas: ArrayLike) -> Floats:
        """Compute each stage's part of the maximum, of its busiest resource."""
        seconds = np.broadcast_arrays(*self.resources_s(work, replicas).values())
        return np.asarray(np.max(np.stack(seconds), axis=0))

    def in_flight(self, replicas: ArrayLike, gpus_after: ArrayLike) -> Integers:
        """Return the microbatches between forward and backward on one replica."""
        return self.schedule.in_flight(
            np.asarray(replicas, dtype=np.int64),
            np.asarray(gpus_after, dtype=np.int64),
            self.microbatches,
        )


def _with_links_alike(placement: Placement) -> list[Integers]:
    """Return the numbers of the stages whose all-reduces have the same link, for each link."""
    rings = [placement.topology.ring(ranks) for ranks in placement.ranks]
    stages: dict[tuple[int, float], list[int]] = {}
    for number, ring in enumerate(rings):
        stages.setdefault(ring, []).append(number)
    return [np.array(numbers) for _, numbers in sorted(stages.items())]
