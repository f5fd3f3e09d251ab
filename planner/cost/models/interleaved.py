"""Time and memory of the interleaved schedule: K workers with v chunks of the model each, m microbatches.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2, whose
chunks are equal: time (m·v + K - 1)·t for chunks of t = F + Bw. For unequal chunks, worker p cannot begin before the
first microbatch has passed the first p stages, must do the work of all its chunks for every microbatch, and what it
returns last must pass those stages again:

    T >= sum over stages i < p of latency_i  +  m·(sum over its chunks of busy)  +  end_p          for every worker p

and (m - 1) times the gradient accumulation of its chunks. latency_i, busy and end_p as in `SynchronousModel`.
Under schedules that split the backward (zb-v) the gradients of weights fill the bubble, and the first term is left out.
The largest of these is the price: a bound, which is the published time with equal chunks. Every stage has r replicas,
each pipeline taking ceil(m / r) of the microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.cost.models.cost_model import CostModel, PlanTime, UnpricedPlan, finish_s, reduce_s, transfer_s
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link, backward_and_reduce_s, link_of
from planner.cost.network.topology import Busy
from planner.cost.setting import Setting
from planner.cost.work import Floats, Integers, Work
from planner.schedule.one_stage import GPIPE
from planner.schedule.schedule import Schedule


class StageSeconds(NamedTuple):
    """Seconds of candidate stages for one microbatch; of the all-reduce and the update for one minibatch."""

    latency_s: Floats  # forward to backward, with its half of the transfers at both ends
    compute_s: Floats
    receive_s: Floats
    send_s: Floats
    backward_s: Floats
    reduce_s: Floats
    update_s: Floats  # with the all-gather that follows it where the optimizer is sharded
    accumulate_s: Floats  # for each microbatch but the first

    @classmethod
    def of(cls, work: Work, model: "InterleavedShape") -> "StageSeconds":
        link = model.link
        receive_s, send_s = transfer_s(work, link)
        handling_s = link.handling_s(work.received_bytes + work.sent_bytes)
        return cls(
            # With a split backward, gradients of weights fill the time in which the pipeline fills.
            latency_s=(not model.schedule.splits_backward) * SynchronousModel(link, GPIPE, 1).sum_s(work),
            compute_s=work.forward_s + work.recompute_s + work.backward_s + handling_s,
            receive_s=receive_s,
            send_s=send_s,
            backward_s=work.backward_s,
            reduce_s=reduce_s(work, model.replicas, link),
            update_s=finish_s(work, model.replicas, link),
            accumulate_s=work.accumulate_s,
        )


@dataclass(frozen=True)
class InterleavedShape:
    """A pipeline of K workers times v chunks, in r copies."""

    schedule: Schedule  # with chunks; it says which worker runs which stage
    link: Link  # of every device
    workers: int
    chunks: int
    replicas: int
    microbatches: int

    @property
    def units(self) -> int:
        return -(-self.microbatches // self.replicas)

    @cached_property
    def stages(self) -> Integers:
        """The stages by chunk and worker, [v, K]."""
        position = [self.schedule.worker_of(stage, self.workers) for stage in range(self.workers * self.chunks)]
        return np.asarray(np.argsort(position, kind="stable").reshape(self.workers, self.chunks).T)

    def worker_s(self, stages: StageSeconds) -> Busy:
        """Return the busy seconds of each worker's resources; the last axis of `stages`, here and below, is stages."""
        latency_s = stages.latency_s[..., self.stages][..., 0, :]
        fill_s = np.cumsum(latency_s, axis=-1) - latency_s
        backward_s = self.total(stages.backward_s + (stages.accumulate_s if self.units > 1 else 0.0))
        reduced_s = backward_and_reduce_s(backward_s, self.total(stages.reduce_s), self.link)
        end_s = fill_s + np.asarray(reduced_s - backward_s + self.total(stages.update_s))
        compute_s, receive_s, send_s = (
            self.units * self.total(each) for each in (stages.compute_s, stages.receive_s, stages.send_s)
        )
        compute_s = compute_s + (self.units - 1) * self.total(stages.accumulate_s)
        return {"compute": compute_s + end_s, "receive": receive_s + end_s, "send": send_s + end_s}

    def in_flight(self) -> tuple[int, ...]:
        return self.schedule.depths((self.replicas,) * (self.workers * self.chunks), self.microbatches, self.chunks)

    def total(self, stages: Floats) -> Floats:
        return np.asarray(stages[..., self.stages].sum(axis=-2))


class InterleavedModel(CostModel):
    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def time(self, plan: UnpricedPlan) -> PlanTime:
        setting, (r,), placement = self.setting, set(plan.replicas), plan.placement
        link, workers = link_of(setting.cluster), len(plan.stages) // setting.chunks
        shape = InterleavedShape(setting.schedule, link, workers, setting.chunks, r, setting.microbatches)
        if placement is None:
            return PlanTime(_busy(shape, [StageSeconds.of(work, shape) for work in plan.works]))
        loads, halves_s = placement.transfers()
        each = []
        for number, (work, ranks) in enumerate(zip(plan.works, placement.ranks, strict=True)):
            placed = replace(shape, link=placement.topology.stage_link(ranks))
            # The chunks of a worker share its link, whose load counts once: for its first chunk.
            times = shape.replicas if number < shape.workers else 0
            receive_s, send_s = loads.busiest(ranks)
            each.append(
                StageSeconds.of(work, placed)._replace(
                    latency_s=StageSeconds.of(work.without_transfers(), placed).latency_s
                    + (not shape.schedule.splits_backward) * np.asarray(halves_s[number]),
                    receive_s=np.asarray(times * receive_s),
                    send_s=np.asarray(times * send_s),
                )
            )
        busy = _busy(shape, each)
        placement.add_shared(busy, loads, shape.microbatches)
        return PlanTime(busy)


def _busy(shape: InterleavedShape, stages: Sequence[StageSeconds]) -> list[Busy]:
    by_resource = shape.worker_s(StageSeconds(*map(np.array, zip(*stages, strict=True))))
    return [{name: seconds[worker] for name, seconds in by_resource.items()} for worker in range(shape.workers)]
