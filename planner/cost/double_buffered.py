"""Time and memory of PipeDream-2BW: two versions of the weights, gradients accumulated over a minibatch.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1. The pipeline never
drains. Minibatch t, of m microbatches, runs at the version that minibatch t - 2 left,

    w(t+1) = w(t) - lr·∇f(w(t-1)),

so that a stage needs two versions however deep the pipeline is, provided that minibatch t - 2 is done when minibatch t
begins. A replica that takes k = floor(m / r) of the microbatches or more, and has d in flight, has finished all but
d - 1 of those before, hence the rule d - 1 <= k; the paper's m >= d is this without replicas.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.asynchronous import (
    BUCKETS,
    CostModel,
    Link,
    Resource,
    ResourceModel,
    backward_and_reduce_s,
    cost_model,
    ring_all_reduce_s,
)
from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, Work
from planner.formats.plan import CostModelName
from planner.schedule.double_buffered import TWO_BW
from planner.schedule.schedule import Schedule

_SLACK = 1e-9


class DoubleBufferedModel(ResourceModel):
    """What each replica's processor and link do per minibatch of m microbatches, n = ceil(m / r) of them the busiest's.

        compute         n·(F + R + Bw) + (n-1)·A + U + max(AR/6, AR - Bw)
        link, each way  n·(activations + gradients) / B + 2(r-1)·W / (r·B) + a·n·messages

    Every microbatch takes its forward and backward, and all but the first add their gradients to those there are, A; Bw
    in the maximum is the last of them, A included. The update and the all-reduce, which begins with the minibatch's
    last backward and is waited for, come once. Divided by m this is (F + Bw) / r + (U + what shows of AR) / m where r
    divides m. With m = r it is the resource model's time of a round. More replicas than microbatches would idle, so
    r <= m.
    """

    counts_gpus_after = True

    def __init__(self, link: Link, microbatches: int) -> None:
        super().__init__(link)
        self.microbatches = self.most_replicas = microbatches

    def least_s(self, work: Work) -> Floats:
        """m·(F + R + Bw) + U: an all-reduce only adds to it, and r replicas with n >= m / r take at least the r-th.

        Nor does A count: there is none where each replica has one microbatch.
        """
        return self.microbatches * (work.compute_s - work.update_s) + work.update_s

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        r = np.asarray(replicas, dtype=np.float64)
        share = np.ceil(self.microbatches / r)
        receive_s, send_s = self._link_s(work)
        ring_s = self._ring_s(work, r)
        return {
            "compute": share * self._once_s(work) + (share - 1) * work.accumulate_s + self._end_s(work, r),
            "receive": share * receive_s + ring_s,
            "send": share * send_s + ring_s,
        }

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Fewest replicas >= `at_least` that meet the target with `after` GPUs behind the stage; else `IMPOSSIBLE`.

        What r replicas spend once per minibatch grows with r (of the all-reduce, a first backward hides no more than
        one that adds up), so it bounds from below what more of them spend, and
        thereby the microbatches that each has time for, and the replicas. Iterated from below, such a bound ends at the
        fewest replicas that satisfy it (the least fixed point of a monotone map).
        """
        most, behind = self.microbatches, np.asarray(after, dtype=np.int64)
        shape = np.broadcast_shapes(work.compute_s.shape, np.shape(at_least), behind.shape)
        r = np.broadcast_to(np.maximum(np.minimum(np.asarray(at_least), IMPOSSIBLE), 1), shape).astype(np.int64)
        r = np.where(behind <= most, r, IMPOSSIBLE)  # else d - 1 > k, whatever r
        busiest_link_s = np.maximum(*self._link_s(work))
        once_s = self._once_s(work)
        while True:
            r = np.where(r <= most, r, IMPOSSIBLE)
            here = np.minimum(r, most).astype(np.float64)
            wanted = np.maximum(
                self._fewest_within(once_s + work.accumulate_s, target_s + work.accumulate_s - self._end_s(work, here)),
                self._fewest_within(busiest_link_s, target_s - self._ring_s(work, here)),
            )
            share = most // np.minimum(r, most)
            held = np.where(-(-behind // r) <= share, 1, -(-behind // share))
            following = np.maximum(r, np.maximum(wanted, held))
            settled = following == r
            # The bound is rounded with slack; the formula itself decides.
            late = settled & (r <= most) & ~(self.stage_s(work, here) <= target_s)
            if np.all(settled & ~late):
                return r
            r = following + late

    def enough_before(self, replicas: Integers, after: Integers) -> NDArray[np.bool_]:
        return (after <= self.microbatches) & (-(-after // replicas) <= self.microbatches // replicas)

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """r times the processor's seconds per minibatch, without latency and messages."""
        share, r = -(-self.microbatches // replicas), float(replicas)
        ring_s = self._ring_s(work, np.float64(r))
        part = 1 / BUCKETS if self.link.overlap else 1.0
        base_s = share * (work.forward_s + work.recompute_s + work.backward_s) + work.update_s
        base_s = base_s + (share - 1) * work.accumulate_s
        sums = [r * (base_s + part * ring_s)]
        if replicas > 1 and part < 1:
            sums.append(r * (base_s - work.last_backward_s(share) + ring_s))
        return sums

    def versions(self, in_flight: Integers) -> Integers:
        return TWO_BW.versions(in_flight)

    def most_in_flight(self, footprint: Footprint, memory_bytes: float) -> Integers:
        held = footprint.divided(self.microbatches)
        return held.most_in_flight(memory_bytes, stashing=False, versions=TWO_BW.weight_versions)

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        return super().fewest_around_cut(output_bytes, gradient_bytes, target_s / self.microbatches)

    def _fewest_within(self, each_s: Floats, room_s: Floats) -> Integers:
        """Fewest replicas that have room for their share of the microbatches, of `each_s`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(each_s > 0, np.floor(room_s / each_s * (1 + _SLACK) + _SLACK), float(self.microbatches))
        share = np.where(room_s >= -_SLACK * np.abs(room_s), np.minimum(share, self.microbatches), 0.0)
        fewest = np.where(share >= 1, np.ceil(self.microbatches / np.maximum(share, 1.0)), float(IMPOSSIBLE))
        return fewest.astype(np.int64)

    def _once_s(self, work: Work) -> Floats:
        """The processor's time for one microbatch."""
        return self._processor_s(work) - work.update_s + work.backward_s

    def _end_s(self, work: Work, replicas: Floats) -> Floats:
        """The processor's time once per minibatch: what the last backward leaves of the all-reduce, and the update."""
        reduce_s = ring_all_reduce_s(work.trainable_bytes, replicas, self.link)
        last_s = work.last_backward_s(np.ceil(self.microbatches / replicas))
        return backward_and_reduce_s(last_s, reduce_s, self.link) - last_s + work.update_s

    def _link_s(self, work: Work) -> tuple[Floats, Floats]:
        bandwidth, latency = self.link.bandwidth_bytes_per_s, self.link.latency_s
        return (
            work.received_bytes / bandwidth + work.received_messages * latency,
            work.sent_bytes / bandwidth + work.sent_messages * latency,
        )

    def _ring_s(self, work: Work, replicas: Floats) -> Floats:
        return 2 * (replicas - 1) / replicas * work.trainable_bytes / self.link.ring_bytes_per_s


def asynchronous_model(name: CostModelName, schedule: Schedule, microbatches: int, link: Link) -> CostModel:
    """The cost model of 1f1b or 2bw."""
    return DoubleBufferedModel(link, microbatches) if schedule.formula == "double-buffered" else cost_model(name, link)
