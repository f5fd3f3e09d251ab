"""Time and memory of the interleaved schedule: K workers, v chunks each, m microbatches.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021,
section 2.2, whose chunks are equal: time (m·v + K - 1)·t for chunks of t = F + Bw. For unequal
chunks, worker p cannot begin before the first microbatch has passed the first p stages, must do the
work of all its chunks for every microbatch, and what it returns last must pass those stages again.
For every worker p

    T >= Σ_{i<p} latency_i  +  m·Σ_{c of p} busy_c  +  (m - 1)·Σ_{c of p} A_c  +  end_p

    T          seconds per minibatch; the largest of these is the price
    latency_i  seconds of the first microbatch at stage i: see `SynchronousModel`
    busy_c     seconds of a microbatch at chunk c on the processor, or on the link, each way
    A_c        seconds of gradient accumulation
    end_p      the rest of the all-reduce, and the update

a bound, which is the published time with equal chunks. Under schedules that split the backward
(zb-v) the gradients of weights fill the bubble, and the first term is left out. Every stage has r
replicas, each pipeline taking ceil(m / r) of the microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.cost.models.cost_model import (
    CostModel,
    PlanTime,
    UnpricedPlan,
    finish_s,
    reduce_s,
    transfer_s,
)
from planner.cost.models.synchronous import SynchronousModel
from planner.cost.network.link import Link, backward_and_reduce_s, link_of
from planner.cost.network.topology import Busy, Placement
from planner.cost.setting import Setting
from planner.cost.work import Floats, Integers, Work
from planner.formats.files import replace
from planner.schedule.one_stage import GPIPE
from planner.schedule.schedule import Schedule


class StageSeconds(NamedTuple):
    """Seconds of stages for one microbatch; of the all-reduce and the update for one minibatch."""

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
        """Return the seconds of stages with this work on the model's replicas and link."""
        link = model.link
        once_s = work.forward_s + work.recompute_s + work.backward_s
        receive_s, send_s = transfer_s(work, link)
        return cls(
            latency_s=model.latency_s(work),
            compute_s=once_s + link.handling_s(work.received_bytes + work.sent_bytes),
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
        """Microbatches that each copy of the pipeline takes."""
        return -(-self.microbatches // self.replicas)

    @cached_property
    def stages(self) -> Integers:
        """The stages by chunk and worker, [v, K]."""
        count = self.workers * self.chunks
        workers = [self.schedule.worker_of(stage, self.workers) for stage in range(count)]
        by_worker = np.argsort(workers, kind="stable")
        return np.asarray(by_worker.reshape(self.workers, self.chunks).T)

    def latency_s(self, work: Work) -> Floats:
        """Return the first microbatch's seconds at each stage, while the pipeline fills and
        drains.
        """
        latency_s = SynchronousModel(self.link, GPIPE, 1).sum_s(work)
        if self.schedule.splits_backward:
            return np.zeros_like(latency_s)  # gradients of weights fill that time
        return latency_s

    def worker_s(self, stages: StageSeconds) -> Busy:
        """Return the busy seconds of each worker's resources. The last axis of arrays is stages."""
        # 1. The first microbatch passes the first chunks of the workers before.
        latency_s = stages.latency_s[..., self.stages][..., 0, :]
        fill_s = np.cumsum(latency_s, axis=-1) - latency_s

        # 2. After the last backward: the rest of the all-reduce, and the update.
        last_s = stages.backward_s
        if self.units > 1:
            last_s = last_s + stages.accumulate_s
        backward_s = self.total(last_s)
        reduced_s = backward_and_reduce_s(backward_s, self.total(stages.reduce_s), self.link)
        end_s = fill_s + np.asarray(reduced_s - backward_s + self.total(stages.update_s))

        # 3. All chunks, for every microbatch.
        compute_s = self.units * self.total(stages.compute_s)
        compute_s = compute_s + (self.units - 1) * self.total(stages.accumulate_s)
        return {
            "compute": compute_s + end_s,
            "receive": self.units * self.total(stages.receive_s) + end_s,
            "send": self.units * self.total(stages.send_s) + end_s,
        }

    def total(self, stages: Floats) -> Floats:
        """Return the sum over the chunks of each worker."""
        return np.asarray(stages[..., self.stages].sum(axis=-2))

    def in_flight(self) -> tuple[int, ...]:
        """Return the microbatches in flight of each stage."""
        replicas = (self.replicas,) * (self.workers * self.chunks)
        return self.schedule.depths(replicas, self.microbatches, self.chunks)


class InterleavedModel(CostModel):
    """The time of plans whose workers have several chunks each."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def time(self, plan: UnpricedPlan) -> PlanTime:
        """See base class."""
        setting = self.setting
        (replicas,) = set(plan.replicas)
        shape = InterleavedShape(
            setting.schedule,
            link_of(setting.cluster),
            workers=len(plan.stages) // setting.chunks,
            chunks=setting.chunks,
            replicas=replicas,
            microbatches=setting.microbatches,
        )
        if plan.placement is not None:
            return _placed_time(shape, plan.placement)
        return PlanTime(_busy(shape, [StageSeconds.of(work, shape) for work in plan.works]))


def _placed_time(shape: InterleavedShape, placement: Placement) -> PlanTime:
    """Compute the time of a plan on the ranks of a cluster with several levels."""
    loads, halves_s = placement.transfers()
    stages: list[StageSeconds] = []
    for number, (work, ranks) in enumerate(zip(placement.works, placement.ranks, strict=True)):
        placed = replace(shape, link=placement.topology.stage_link(ranks))
        latency_s = placed.latency_s(work.without_transfers())
        if not shape.schedule.splits_backward:
            latency_s = latency_s + halves_s[number]

        # The chunks of a worker share its link, whose load counts once: for its first chunk.
        copies = shape.replicas if number < shape.workers else 0
        receive_s, send_s = loads.busiest(ranks)
        seconds = StageSeconds.of(work, placed)._replace(
            latency_s=latency_s,
            receive_s=np.asarray(copies * receive_s),
            send_s=np.asarray(copies * send_s),
        )
        stages.append(seconds)

    busy = _busy(shape, stages)
    placement.add_shared(busy, loads, shape.microbatches)
    return PlanTime(busy)


def _busy(shape: InterleavedShape, stages: Sequence[StageSeconds]) -> list[Busy]:
    """Return the busy seconds of each worker's resources."""
    columns = StageSeconds(*map(np.array, zip(*stages, strict=True)))
    by_resource = shape.worker_s(columns)

    def busy_of(worker: int) -> Busy:
        return {resource: seconds[worker] for resource, seconds in by_resource.items()}

    return [busy_of(worker) for worker in range(shape.workers)]
