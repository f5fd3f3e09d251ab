"""The inverse of each asynchronous cost model: how many replicas meet a target time.

A closed form proposes numbers of replicas, and the cost model itself decides, so that the answer is
exact to the last bit.
"""

from abc import abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.models.cost_model import StageModel, ending_s, transfer_s
from planner.cost.network.link import BUCKETS, Link
from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, Work
from planner.schedule.one_stage import ONE_F_ONE_B, TWO_BW
from planner.schedule.schedule import Schedule
from planner.units import SLACK


class ReplicaModel(StageModel):
    """A cost model of an asynchronous pipeline, and the replicas that meet a target time."""

    schedule: Schedule = ONE_F_ONE_B
    microbatches = 1  # per minibatch
    most_replicas = IMPOSSIBLE  # of a stage
    more_is_faster = False  # whether from two replicas on more never make a stage slower

    def may_have(self, replicas: Integers) -> NDArray[np.bool_]:
        """Return whether stages may have so many replicas."""
        return np.asarray(replicas <= self.most_replicas)

    def enough_before(self, replicas: Integers, after: Integers) -> NDArray[np.bool_]:
        """Return whether replicas that meet a target before no GPUs meet it before `after` GPUs."""
        return np.ones(replicas.shape, dtype=bool)

    @abstractmethod
    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        """Return increasing replica counts >= 2, among them the fewest that meets the target."""

    def least_s(self, work: Work) -> Floats:
        """Return the least GPU seconds per minibatch of a stage on any number of replicas."""
        return work.compute_s

    def most_in_flight(self, footprint: Footprint, memory_bytes: float) -> Integers:
        """Return the most microbatches in flight with which a stage fits the memory."""
        return footprint.divided(self.microbatches).most_in_flight(
            memory_bytes,
            self.schedule.stashes,
            self.schedule.weight_versions,
        )

    def fewest_replicas(
        self,
        work: Work,
        target_s: float,
        at_least: ArrayLike = 1,
        after: ArrayLike = 0,
    ) -> Integers:
        """Return the fewest replicas >= `at_least` with which each stage meets the target.

        Args:
            work: of the stages.
            target_s: seconds per minibatch to meet.
            at_least: replicas of each stage.
            after: GPUs behind each stage, which matter under 2bw only.

        Returns:
            The replicas, or `IMPOSSIBLE`.
        """
        floor = np.minimum(np.asarray(at_least, dtype=np.float64), IMPOSSIBLE)
        shape = np.broadcast_shapes(work.compute_s.shape, floor.shape)
        fewest = np.full(shape, float(IMPOSSIBLE))

        # 1. One replica, which has no all-reduce.
        if np.any(work.compute_s <= target_s):
            fewest[(self.stage_s(work, 1) <= target_s) & (floor <= 1)] = 1.0
            if fewest.max() <= 1:
                return fewest.astype(np.int64)

        # 2. More of them: from each bound, or one more, as it was rounded with a slack that may be
        # too generous.
        for bound in self._lower_bounds(work, target_s):
            least = np.ceil(np.minimum(bound, IMPOSSIBLE) * (1 - SLACK))
            least = np.maximum(least, np.maximum(floor, 2.0))
            for replicas in (least, least + 1):
                missing = (fewest >= IMPOSSIBLE) & (replicas < IMPOSSIBLE)
                if not missing.any():
                    break
                meets = missing & (self.stage_s(work, replicas) <= target_s)
                fewest = np.where(meets, replicas, fewest)

        return fewest.astype(np.int64)


class ReplicaModelLike(ReplicaModel):
    """A cost model that differs from another one in its replicas alone, not in its cuts."""

    def __init__(self, like: ReplicaModel) -> None:
        super().__init__(like.link)
        self.like = like

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        return self.like._lower_bounds(work, target_s)


def larger_root(a: ArrayLike, b: Floats, c: Floats) -> Floats:
    """Return the larger root of a·r² - b·r + c; 0 where there is none, or `a` is not positive."""
    a = np.asarray(a, dtype=np.float64)
    discriminant = b * b - 4 * a * c
    exists = (a > 0) & (discriminant >= 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.sqrt(np.maximum(discriminant, 0.0))
        root = (b + distance) / (2 * a)

    return np.where(exists, root, 0.0)


class AsynchronousReplicaModel(AsynchronousModel, ReplicaModel):
    """The inverse of `AsynchronousModel`.

    In its symbols, with x the seconds on one replica of what more replicas share, and a part p of
    the all-reduce AR = 2(r-1)·W / (r·B) + 2(r-1)·a, a resource meets the target T where

        link        T·r² - (x + 2W/B)·r + 2W/B >= 0
        processor   (T - 2ap)·r² - (x + 2pW/B - 2ap)·r + 2pW/B >= 0       from (x + p·AR) / r <= T

    once with the backward in x and the last bucket, p = 1 / `BUCKETS`, and once without it and p =
    1. Both grow from r = 2 on, but for T < 2ap: there the parabola opens downwards, and fewer
    replicas are better.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.more_is_faster = link.latency_s == 0

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        ring_s = 2 * work.trainable_bytes / self.link.ring_bytes_per_s
        steps_s = np.where(work.trainable_bytes > 0, 2 * self.link.latency_s, 0.0)
        base_s = self._processor_s(work)

        # 1. Without the all-reduce on the processor.
        messages_s = np.maximum(*transfer_s(work, self.link))
        on_link = larger_root(target_s, messages_s + ring_s, ring_s)
        on_processor = (base_s + work.backward_s) / target_s
        simple = np.maximum(on_processor, on_link)

        # 2. With it.
        both = simple
        for backward_part, reduce_part in self._parts():
            shared_s = base_s + backward_part * work.backward_s
            reduce_s = reduce_part * ring_s
            step_s = reduce_part * steps_s
            processor = larger_root(target_s - step_s, shared_s + reduce_s - step_s, reduce_s)
            both = np.maximum(both, processor)

        # Without latency more replicas never hurt.
        if self.link.latency_s == 0:
            return [both]
        return [simple, both]

    def _parts(self) -> tuple[tuple[float, float], ...]:
        """Return the parts of backward and all-reduce that together occupy a processor."""
        if not self.link.overlap:
            return ((1.0, 1.0),)
        return ((1.0, 1 / BUCKETS), (0.0, 1.0))


class DoubleBufferedReplicaModel(DoubleBufferedModel, AsynchronousReplicaModel):
    """The inverse of `DoubleBufferedModel`. More replicas than microbatches would idle."""

    schedule = TWO_BW

    def __init__(self, link: Link, microbatches: int) -> None:
        super().__init__(link, microbatches)
        self.most_replicas = microbatches
        self.more_is_faster = False  # with one more, the busiest may have as many microbatches

    def least_s(self, work: Work) -> Floats:
        """Return m·(F + R + Bw) + U.

        r replicas with n >= m / r microbatches each take at least the r-th part. The all-reduce
        only adds to that. A does not count: no replica accumulates if each runs one microbatch.
        """
        return self.microbatches * (work.compute_s - work.update_s) + work.update_s

    def fewest_replicas(
        self,
        work: Work,
        target_s: float,
        at_least: ArrayLike = 1,
        after: ArrayLike = 0,
    ) -> Integers:
        """Return the least fixed point of a monotone map, iterated from below.

        The seconds that r replicas spend once per minibatch grow with r. So they are a lower bound
        for more replicas, which limits the microbatches that each has time for, and thereby gives a
        lower bound of the replicas.
        """
        most = self.microbatches
        behind = np.asarray(after, dtype=np.int64)
        shape = np.broadcast_shapes(work.compute_s.shape, np.shape(at_least), behind.shape)
        floor = np.maximum(np.minimum(np.asarray(at_least), IMPOSSIBLE), 1)
        fewest = np.broadcast_to(floor, shape).astype(np.int64)
        fewest = np.where(behind <= most, fewest, IMPOSSIBLE)  # else d - 1 > k, whatever r

        messages_s = np.maximum(*transfer_s(work, self.link))
        once_s = self._once_s(work)
        while True:
            # 1. What the replicas spend once per minibatch leaves time for so many microbatches
            # each.
            fewest = np.where(fewest <= most, fewest, IMPOSSIBLE)
            here = np.minimum(fewest, most)
            replicas = here.astype(np.float64)
            end_s = ending_s(work, replicas, most, self.link)
            for_processor = self._fewest_within(
                once_s + work.accumulate_s,
                target_s + work.accumulate_s - end_s,
            )
            for_link = self._fewest_within(messages_s, target_s - self._ring_s(work, replicas))

            # 2. Two versions of the weights are enough for the GPUs behind.
            share = most // here
            for_versions = np.where(-(-behind // fewest) <= share, 1, -(-behind // share))

            # 3. The bounds are rounded with slack; the formula itself decides.
            bound = np.maximum(np.maximum(for_processor, for_link), for_versions)
            bound = np.maximum(bound, fewest)
            settled = bound == fewest
            late = settled & (fewest <= most) & ~(self.stage_s(work, replicas) <= target_s)
            if np.all(settled & ~late):
                return fewest

            fewest = bound + late

    def enough_before(self, replicas: Integers, after: Integers) -> NDArray[np.bool_]:
        share = self.microbatches // replicas
        return (after <= self.microbatches) & (-(-after // replicas) <= share)

    def _fewest_within(self, each_s: Floats, room_s: Floats) -> Integers:
        """Return the fewest replicas that have time for their microbatches, of `each_s` each."""
        most = self.microbatches
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.floor(room_s / each_s * (1 + SLACK) + SLACK)
        share = np.where(each_s > 0, share, float(most))
        share = np.minimum(share, most)

        has_room = room_s >= -SLACK * np.abs(room_s)
        share = np.where(has_room, share, 0.0)

        fewest = np.ceil(most / np.maximum(share, 1.0))
        fewest = np.where(share >= 1, fewest, float(IMPOSSIBLE))
        return fewest.astype(np.int64)


def replica_model(
    link: Link, schedule: Schedule = ONE_F_ONE_B, microbatches: int = 1
) -> ReplicaModel:
    """Return the bounds of an asynchronous schedule on devices with this link."""
    if schedule.formula == "double-buffered":
        return DoubleBufferedReplicaModel(link, microbatches)
    return AsynchronousReplicaModel(link)
