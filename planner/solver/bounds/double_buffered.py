"""Bounds of PipeDream-2BW."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.models.double_buffered import DoubleBufferedModel
from planner.cost.network.link import BUCKETS, Link
from planner.cost.rounding import SLACK
from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, Work
from planner.schedule.double_buffered import TWO_BW
from planner.solver.bounds.asynchronous import AsynchronousBounds


class DoubleBufferedBounds(DoubleBufferedModel, AsynchronousBounds):
    """See `DoubleBufferedModel` for the formulas. More replicas than microbatches would idle."""

    counts_gpus_after = True

    def __init__(self, link: Link, microbatches: int) -> None:
        super().__init__(link, microbatches)
        self.most_replicas = microbatches
        self.more_is_faster = False  # with one more, the busiest may have as many microbatches

    def least_s(self, work: Work) -> Floats:
        """Return m·(F + R + Bw) + U: r replicas with n >= m / r microbatches each take at least the r-th part.

        The all-reduce only adds to that. A does not count: no replica accumulates if each runs one microbatch.
        """
        return self.microbatches * (work.compute_s - work.update_s) + work.update_s

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Return the fewest replicas >= `at_least` that meet the target with `after` GPUs behind; else `IMPOSSIBLE`.

        The seconds that r replicas spend once per minibatch grow with r. So they are a lower bound for more replicas,
        which limits the microbatches that each has time for, and thereby gives a lower bound of the replicas. Iterated
        from below, this ends at the fewest replicas that meet it: the least fixed point of a monotone map.
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
        """Return r times the processor's seconds per minibatch, without latency and messages."""
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

    def held_bytes(self, footprint: Footprint, in_flight: Integers) -> Floats:
        return super().held_bytes(footprint.divided(self.microbatches), in_flight)

    def most_in_flight(self, footprint: Footprint, memory_bytes: float) -> Integers:
        held = footprint.divided(self.microbatches)
        return held.most_in_flight(memory_bytes, stashing=False, versions=TWO_BW.weight_versions)

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        return super().fewest_around_cut(output_bytes, gradient_bytes, target_s / self.microbatches)

    def _fewest_within(self, each_s: Floats, room_s: Floats) -> Integers:
        """Return the fewest replicas that have time for their share of the microbatches, of `each_s` each."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(each_s > 0, np.floor(room_s / each_s * (1 + SLACK) + SLACK), float(self.microbatches))
        share = np.where(room_s >= -SLACK * np.abs(room_s), np.minimum(share, self.microbatches), 0.0)
        fewest = np.where(share >= 1, np.ceil(self.microbatches / np.maximum(share, 1.0)), float(IMPOSSIBLE))
        return fewest.astype(np.int64)
