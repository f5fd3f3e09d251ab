"""The time of a stage under asynchronous schedules: three cost models with one interface, and what they share.

A candidate stage is described by its `Work` (seconds and bytes per microbatch, before replication) and its
`Footprint` (bytes it holds). See the classes for the formulas and their sources; those of schedules that drain are in
`planner.cost.synchronous`.

Legend:  F forward, Bw backward, U update, R recomputation seconds;  W trainable bytes;  r replicas;  B bytes/s;
a latency in s;  A seconds of adding gradients to those of earlier microbatches, which depend on W alone, not on how
large a microbatch is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, Work, fewest_to_hold
from planner.formats.cluster import Cluster
from planner.formats.plan import CostModelName

# Whether stages keep what their backward needs, or run their forward again: where memory demands it, never, always.
RecomputeRule = Literal["auto", "never", "always"]
Resource = Literal["compute", "receive", "send", "shared_link", "cut_before", "cut_after"]

# Parts in which the executor all-reduces a stage's gradients: the more, the more overlaps with the backward.
BUCKETS = 6
# Part of a backward that is for the weights' gradients. Profiles do not know it; where layers are products of matrices
# both parts are one product each. Measured on Transformer layers on a CPU: 46 to 47%.
WEIGHT_SHARE = 0.5
# Closed forms are rounded with this slack, then checked with the formula itself.
_SLACK = 1e-9


@dataclass(frozen=True)
class Link:
    """What one device sends while it receives as much, by itself and in an all-reduce.

    `overlap`: whether it does so while it computes.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    all_reduce_bandwidth_bytes_per_s: float | None = None  # where it differs
    overlap: bool = True

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth within an all-reduce."""
        return self.all_reduce_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s

    def handling_s(self, moved_bytes: ArrayLike) -> Floats:
        """Seconds of the processor for messages of so many bytes, received and sent; none where they overlap.

        The bandwidth is of both directions at once, so a byte takes half of its time.
        """
        cost = 0.0 if self.overlap else 0.5 / self.bandwidth_bytes_per_s
        return np.asarray(np.asarray(moved_bytes, dtype=np.float64) * cost)


def link_of(cluster: Cluster) -> Link:
    """The slowest link of the cluster, which prices every transfer."""
    reduces = [level.all_reduce_bandwidth_bytes_per_s for level in cluster.levels]
    return Link(
        cluster.slowest_bandwidth_bytes_per_s,
        max(level.latency_s for level in cluster.levels),
        min((bandwidth for bandwidth in reduces if bandwidth is not None), default=None),
        cluster.overlap,
    )


def ring_all_reduce_s(trainable_bytes: ArrayLike, replicas: ArrayLike, link: Link) -> Floats:
    """Seconds for a ring all-reduce; nothing without replicas or without gradients.

    Each worker sends and receives 2(r-1)/r of the bytes in 2(r-1) steps (Patarasuk & Yuan 2009, section 3).
    """
    size, r = np.asarray(trainable_bytes, dtype=np.float64), np.asarray(replicas, dtype=np.float64)
    steps = np.where(size > 0, 2 * (r - 1), 0.0)
    return np.asarray(steps / r * size / link.ring_bytes_per_s + steps * link.latency_s)


def backward_and_reduce_s(backward_s: ArrayLike, reduce_s: ArrayLike, link: Link) -> Floats:
    """Seconds from the start of a backward to the end of its all-reduce, `BUCKETS` parts of which overlap, at least.

    The last part waits for the backward's end. The first one is there as soon as the last layer's gradients are, which
    a stage's times do not tell, but the simulation does (`planner.cost.buckets`): here, from the backward's start.
    """
    backward, reduce = np.asarray(backward_s, dtype=np.float64), np.asarray(reduce_s, dtype=np.float64)
    if not link.overlap:
        return np.asarray(backward + reduce)
    return np.maximum(backward + reduce / BUCKETS, reduce)


class CostModel(ABC):
    """Steady state of the asynchronous pipeline: the minibatch time is the largest busy time of any resource."""

    name: CostModelName
    microbatches = 1  # per minibatch
    most_replicas = IMPOSSIBLE  # of a stage
    counts_gpus_after = False  # whether a stage's replicas depend on how many GPUs follow it, memory apart

    def __init__(self, link: Link) -> None:
        self.link = link

    @abstractmethod
    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        """Busy seconds per minibatch of each resource of a stage on `replicas` workers."""

    def enough_before(self, replicas: Integers, after: Integers) -> NDArray[np.bool_]:
        """Whether so many replicas, which meet a target with none, do so with GPUs `after` the stage."""
        return np.ones(replicas.shape, dtype=bool)

    @abstractmethod
    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        """Replica counts >= 2, in increasing order, one of which is the fewest that meets the target, if any is."""

    @abstractmethod
    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """Seconds that add up over a stage's layers and are at most r·T if it meets the target T, whatever it sends."""

    def cut_within(self, output_bytes: Floats, replicas: int, target_s: float) -> NDArray[np.bool_]:
        """Whether a stage may end, or begin, at cuts that these bytes cross; the end of a first stage is not asked."""
        return np.ones(output_bytes.shape, dtype=bool)

    @abstractmethod
    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Fewest GPUs before and after cuts that these bytes cross, for any plan within the target."""

    def stage_s(self, work: Work, replicas: ArrayLike) -> Floats:
        """Seconds per minibatch: the busiest resource."""
        first, *others = self.resources_s(work, replicas).values()
        for other in others:
            first = np.maximum(first, other)
        return first

    def least_s(self, work: Work) -> Floats:
        """Seconds per minibatch that a stage takes of its GPUs together, at least, however many they are."""
        return work.compute_s

    def versions(self, in_flight: Integers) -> Integers:
        """Versions of its weights that a stage holds with so many microbatches in flight."""
        return in_flight

    def fewest_for_memory(self, footprint: Footprint, gpus_after: ArrayLike, memory_bytes: float | None) -> ArrayLike:
        """Fewest replicas with which a stage fits the memory, with GPUs after it; `IMPOSSIBLE` where none do."""
        if memory_bytes is None:
            return 1
        return fewest_to_hold(self.most_in_flight(footprint, memory_bytes), gpus_after)

    def most_in_flight(self, footprint: Footprint, memory_bytes: float) -> Integers:
        """Most microbatches in flight with which a stage fits the memory."""
        return footprint.most_in_flight(memory_bytes, stashing=True)

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Fewest replicas >= `at_least` with which each stage meets the target; `IMPOSSIBLE` where none do.

        The GPUs `after` a stage matter under 2bw only.

        The closed form gives the candidates and the formula itself decides, so a stage that is said to meet the
        target does, to the last bit. One replica is a case of its own: the second one brings the all-reduce.
        """
        floor = np.minimum(np.asarray(at_least, dtype=np.float64), IMPOSSIBLE)
        answer = np.full(np.broadcast_shapes(work.compute_s.shape, floor.shape), float(IMPOSSIBLE))
        if alone := bool(np.any(work.compute_s <= target_s)):
            answer[(self.stage_s(work, 1) <= target_s) & (floor <= 1)] = 1.0
        if alone and answer.max() <= 1:
            return answer.astype(np.int64)
        for bound in self._lower_bounds(work, target_s):
            least = np.maximum(np.ceil(np.minimum(bound, IMPOSSIBLE) * (1 - _SLACK)), np.maximum(floor, 2.0))
            for replicas in (least, least + 1):  # the second undoes a rounding slack that was too generous
                missing = (answer >= IMPOSSIBLE) & (replicas < IMPOSSIBLE)
                if not missing.any():
                    break
                meets = missing & (self.stage_s(work, replicas) <= target_s)
                answer = np.where(meets, replicas, answer)
        return answer.astype(np.int64)


class ResourceModel(CostModel):
    """What each replica's processor and link do, per minibatch. The default: it is the one that matches measurement.

        compute        (F + R + U + max(Bw + AR/n, AR)) / r
        link, each way (activations + gradients) / (r·B) + 2(r-1)·W / (r²·B) + a·messages / r

    AR, the ring all-reduce, goes on bucket by bucket during the replica's own backward, all but the last of the n
    buckets. Where the processors themselves move the messages, nothing overlaps, and the
    processor's time is (F + R + U + Bw + AR + bytes received and sent / 2B) / r.

    A value that several later stages use travels along them, so each crosses every link at most once.
    """

    name = "resource"

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth, latency = self.link.bandwidth_bytes_per_s, self.link.latency_s
        reduce_s = ring_all_reduce_s(work.trainable_bytes, r, self.link)
        ring_s = 2 * (r - 1) / (r * r) * work.trainable_bytes / self.link.ring_bytes_per_s
        return {
            "compute": (self._processor_s(work) + backward_and_reduce_s(work.backward_s, reduce_s, self.link)) / r,
            "receive": (work.received_bytes / bandwidth + work.received_messages * latency) / r + ring_s,
            "send": (work.sent_bytes / bandwidth + work.sent_messages * latency) / r + ring_s,
        }

    def _processor_s(self, work: Work) -> Floats:
        """What no all-reduce hides behind."""
        handling_s = self.link.handling_s(work.received_bytes + work.sent_bytes)
        return work.forward_s + work.recompute_s + work.update_s + handling_s

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        bandwidth, latency = self.link.bandwidth_bytes_per_s, self.link.latency_s
        ring_s = 2 * work.trainable_bytes / self.link.ring_bytes_per_s
        busier_s = np.maximum(
            work.received_bytes / bandwidth + work.received_messages * latency,
            work.sent_bytes / bandwidth + work.sent_messages * latency,
        )
        # T·r² - (x + 2W/B)·r + 2W/B >= 0, whose left side grows from r = 2 on.
        link = larger_root(target_s, busier_s + ring_s, ring_s)
        base_s = self._processor_s(work)
        simple = np.maximum((base_s + work.backward_s) / target_s, link)
        # (x + p·AR) / r <= T, with AR's latency 2(r-1)a: (T - 2ap)·r² - (x + 2pW/B - 2ap)·r + 2pW/B >= 0, both for the
        # backward with the last part of AR and for AR alone. Below 2ap the parabola opens downwards: fewer replicas
        # are better, so `simple` is the only candidate.
        steps_s = np.where(work.trainable_bytes > 0, 2 * latency, 0.0)
        both = simple
        for backward_part, reduce_part in ((1.0, 1 / BUCKETS), (0.0, 1.0)) if self.link.overlap else ((1.0, 1.0),):
            own_s, ring_part_s, step_s = (
                base_s + backward_part * work.backward_s,
                reduce_part * ring_s,
                reduce_part * steps_s,
            )
            both = np.maximum(both, larger_root(target_s - step_s, own_s + ring_part_s - step_s, ring_part_s))
        return [simple, both] if latency > 0 else [both]  # without latency more replicas never hurt

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """Compute without latency and messages: the larger of two sums, with Bw and the last of AR, or AR alone."""
        ring_s = 2 * (replicas - 1) / replicas * work.trainable_bytes / self.link.ring_bytes_per_s
        part = 1 / BUCKETS if self.link.overlap else 1.0
        base_s = work.forward_s + work.recompute_s + work.update_s
        sums = [base_s + work.backward_s + part * ring_s]
        if replicas > 1 and part < 1:
            sums.append(base_s + ring_s)
        return sums

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Some stage before sends each value and some stage after receives it; its gradient returns."""
        busier = np.maximum(output_bytes, gradient_bytes) / (self.link.bandwidth_bytes_per_s * target_s)
        fewest = np.ceil(busier * (1 - _SLACK))
        return fewest, fewest


class PublishedModel(CostModel):
    """PipeDream's published optimizer (optimizer_graph_hierarchical.py, one level).

    stage     (C + 4(r-1)·W / (B·r)) / r
    boundary  2·a / (B·r), with the r of the stage after the cut; also of the stage before it, unless that is the
              first, for which the optimizer leaves it out
    """

    name = "pipedream"

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": (work.compute_s + 4 * (r - 1) * work.trainable_bytes / (bandwidth * r)) / r,
            "cut_before": 2 * work.cut_before_bytes / (bandwidth * r),
            "cut_after": 2 * self._charged_after(work) / (bandwidth * r),
        }

    def _charged_after(self, work: Work) -> Floats:
        return np.where(work.is_first, 0.0, work.cut_after_bytes)

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        bandwidth = self.link.bandwidth_bytes_per_s
        ring_s = 4 * work.trainable_bytes / bandwidth
        cuts = 2 * np.maximum(work.cut_before_bytes, self._charged_after(work)) / bandwidth
        stage = larger_root(target_s, work.compute_s + ring_s, ring_s)
        return [np.maximum(np.maximum(stage, cuts / target_s), work.compute_s / target_s)]

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """All of the stage's term."""
        bandwidth = self.link.bandwidth_bytes_per_s
        return [work.compute_s + 4 * (replicas - 1) * work.trainable_bytes / (bandwidth * replicas)]

    def cut_within(self, output_bytes: Floats, replicas: int, target_s: float) -> NDArray[np.bool_]:
        """The boundary's term."""
        return 2 * output_bytes / (self.link.bandwidth_bytes_per_s * replicas) * (1 - _SLACK) <= target_s

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Replicas that the stage after the cut needs; the stage before it may be the first, which is not charged."""
        after = np.ceil(2 * output_bytes / (self.link.bandwidth_bytes_per_s * target_s) * (1 - _SLACK))
        return np.ones_like(after), after


class PaperModel(CostModel):
    """The equation of the SOSP 2019 paper (section 3.1): stage max(C, 2(r-1)·W/B) / r, boundary 2·a / B."""

    name = "paper"

    def resources_s(self, work: Work, replicas: ArrayLike) -> dict[Resource, Floats]:
        r = np.asarray(replicas, dtype=np.float64)
        bandwidth = self.link.bandwidth_bytes_per_s
        return {
            "compute": np.maximum(work.compute_s, 2 * (r - 1) * work.trainable_bytes / bandwidth) / r,
            "cut_before": 2 * work.cut_before_bytes / bandwidth + 0 * r,
        }

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        # The all-reduce's share grows with r here, so the fewest replicas that compute in time are the only hope.
        return [np.asarray(work.compute_s / target_s)]

    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """Both sides of the stage's maximum."""
        if replicas == 1:
            return [work.compute_s]
        return [work.compute_s, 2 * (replicas - 1) * work.trainable_bytes / self.link.bandwidth_bytes_per_s]

    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Replicas do not help: a cut is within the target or not."""
        within = 2 * output_bytes / self.link.bandwidth_bytes_per_s <= target_s
        return np.ones_like(output_bytes), np.where(within, 1.0, float(IMPOSSIBLE))


def larger_root(a: ArrayLike, b: Floats, c: Floats) -> Floats:
    """Larger root of a·r² - b·r + c; 0 where there is none, or where `a` is not positive."""
    a, usable = np.asarray(a, dtype=np.float64), np.asarray(a) > 0
    discriminant = b * b - 4 * a * c
    with np.errstate(divide="ignore", invalid="ignore"):
        root = (b + np.sqrt(np.maximum(discriminant, 0.0))) / (2 * a)
    return np.where(usable & (discriminant >= 0), root, 0.0)


def cost_model(name: CostModelName, link: Link) -> CostModel:
    """The cost model of that name."""
    models: dict[CostModelName, type[CostModel]] = {
        "resource": ResourceModel,
        "pipedream": PublishedModel,
        "paper": PaperModel,
    }
    return models[name](link)
