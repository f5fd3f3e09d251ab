"""The inverse of each asynchronous cost model, how many replicas meet a target time; the bound of perfect balance."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.layer_costs import LayerCosts
from planner.cost.models.asynchronous import AsynchronousModel, DoubleBufferedModel
from planner.cost.models.cost_model import StageModel, ending_s, transfer_s
from planner.cost.network.link import BUCKETS, Link, link_of
from planner.cost.setting import Setting
from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, Work
from planner.formats.profile import KIND_COLUMNS, Profile
from planner.schedule.one_stage import ONE_F_ONE_B, TWO_BW
from planner.schedule.schedule import Schedule
from planner.units import SLACK


class Bounds(StageModel):
    """A cost model of an asynchronous pipeline, and the replicas that stages need to meet a target time."""

    schedule: Schedule = ONE_F_ONE_B
    microbatches = 1  # per minibatch
    most_replicas = IMPOSSIBLE  # of a stage
    more_is_faster = False  # whether from two replicas on more never make a stage slower

    def may_have(self, replicas: Integers) -> NDArray[np.bool_]:
        """Return whether stages may have so many replicas."""
        return np.asarray(replicas <= self.most_replicas)

    def enough_before(self, replicas: Integers, after: Integers) -> NDArray[np.bool_]:
        """Return whether replicas that meet a target with no GPUs after the stage meet it with `after`."""
        return np.ones(replicas.shape, dtype=bool)

    @abstractmethod
    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        """Return increasing replica counts >= 2; one of them is the fewest that meets the target, if any does."""

    def least_s(self, work: Work) -> Floats:
        """Return the least GPU seconds per minibatch that a stage takes, on any number of replicas."""
        return work.compute_s

    def held_bytes(self, footprint: Footprint, in_flight: Integers) -> Floats:
        """Return the peak bytes of stages with so many microbatches in flight."""
        return footprint.divided(self.microbatches).total_bytes(in_flight, self.schedule.versions(in_flight))

    def most_in_flight(self, footprint: Footprint, memory_bytes: float) -> Integers:
        """Return the most microbatches in flight with which a stage fits the memory."""
        held, schedule = footprint.divided(self.microbatches), self.schedule
        return held.most_in_flight(memory_bytes, schedule.stashes, schedule.weight_versions)

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Return the fewest replicas >= `at_least` with which each stage meets the target; else `IMPOSSIBLE`.

        The GPUs `after` a stage matter under 2bw only. A closed form proposes, and the cost model itself decides, so
        that the answer is exact to the last bit. The all-reduce begins with the second replica.
        """
        floor = np.minimum(np.asarray(at_least, dtype=np.float64), IMPOSSIBLE)
        answer = np.full(np.broadcast_shapes(work.compute_s.shape, floor.shape), float(IMPOSSIBLE))
        if alone := bool(np.any(work.compute_s <= target_s)):
            answer[(self.stage_s(work, 1) <= target_s) & (floor <= 1)] = 1.0
        if alone and answer.max() <= 1:
            return answer.astype(np.int64)
        for bound in self._lower_bounds(work, target_s):
            least = np.maximum(np.ceil(np.minimum(bound, IMPOSSIBLE) * (1 - SLACK)), np.maximum(floor, 2.0))
            for replicas in (least, least + 1):  # the second undoes a rounding slack that was too generous
                missing = (answer >= IMPOSSIBLE) & (replicas < IMPOSSIBLE)
                if not missing.any():
                    break
                meets = missing & (self.stage_s(work, replicas) <= target_s)
                answer = np.where(meets, replicas, answer)
        return answer.astype(np.int64)


class BoundsLike(Bounds):
    """A cost model that differs from another one in its replicas alone: what cuts cost is the same."""

    def __init__(self, like: Bounds) -> None:
        super().__init__(like.link)
        self.like = like

    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        return self.like._lower_bounds(work, target_s)


def larger_root(a: ArrayLike, b: Floats, c: Floats) -> Floats:
    """Return the larger root of a·r² - b·r + c; 0 where there is none, or where `a` is not positive."""
    a, usable = np.asarray(a, dtype=np.float64), np.asarray(a) > 0
    discriminant = b * b - 4 * a * c
    with np.errstate(divide="ignore", invalid="ignore"):
        root = (b + np.sqrt(np.maximum(discriminant, 0.0))) / (2 * a)
    return np.where(usable & (discriminant >= 0), root, 0.0)


class AsynchronousBounds(AsynchronousModel, Bounds):
    """The inverse of `AsynchronousModel`."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.more_is_faster = link.latency_s == 0

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
            own_s, ring_part_s = base_s + backward_part * work.backward_s, reduce_part * ring_s
            step_s = reduce_part * steps_s
            both = np.maximum(both, larger_root(target_s - step_s, own_s + ring_part_s - step_s, ring_part_s))
        return [simple, both] if latency > 0 else [both]  # without latency more replicas never hurt


class DoubleBufferedBounds(DoubleBufferedModel, AsynchronousBounds):
    """The inverse of `DoubleBufferedModel`. More replicas than microbatches would idle."""

    schedule = TWO_BW

    def __init__(self, link: Link, microbatches: int) -> None:
        super().__init__(link, microbatches)
        self.most_replicas = microbatches
        self.more_is_faster = False  # with one more, the busiest may have as many microbatches

    def least_s(self, work: Work) -> Floats:
        # m·(F + R + Bw) + U: r replicas with n >= m / r microbatches each take at least the r-th part. The all-reduce
        # only adds to that. A does not count: no replica accumulates if each runs one microbatch.
        return self.microbatches * (work.compute_s - work.update_s) + work.update_s

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Return the least fixed point of a monotone map, iterated from below.

        The seconds that r replicas spend once per minibatch grow with r. So they are a lower bound for more replicas,
        which limits the microbatches that each has time for, and thereby gives a lower bound of the replicas.
        """
        most, behind = self.microbatches, np.asarray(after, dtype=np.int64)
        shape = np.broadcast_shapes(work.compute_s.shape, np.shape(at_least), behind.shape)
        r = np.broadcast_to(np.maximum(np.minimum(np.asarray(at_least), IMPOSSIBLE), 1), shape).astype(np.int64)
        r = np.where(behind <= most, r, IMPOSSIBLE)  # else d - 1 > k, whatever r
        busiest_link_s = np.maximum(*transfer_s(work, self.link))
        once_s = self._once_s(work)
        while True:
            r = np.where(r <= most, r, IMPOSSIBLE)
            here = np.minimum(r, most).astype(np.float64)
            end_s = ending_s(work, here, most, self.link)
            wanted = np.maximum(
                self._fewest_within(once_s + work.accumulate_s, target_s + work.accumulate_s - end_s),
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

    def _fewest_within(self, each_s: Floats, room_s: Floats) -> Integers:
        """Return the fewest replicas that have time for their share of the microbatches, of `each_s` each."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(each_s > 0, np.floor(room_s / each_s * (1 + SLACK) + SLACK), float(self.microbatches))
        share = np.where(room_s >= -SLACK * np.abs(room_s), np.minimum(share, self.microbatches), 0.0)
        fewest = np.where(share >= 1, np.ceil(self.microbatches / np.maximum(share, 1.0)), float(IMPOSSIBLE))
        return fewest.astype(np.int64)


def bounds_for(link: Link, schedule: Schedule = ONE_F_ONE_B, microbatches: int = 1) -> Bounds:
    """Return the bounds of an asynchronous schedule on devices with this link."""
    if schedule.formula == "double-buffered":
        return DoubleBufferedBounds(link, microbatches)
    return AsynchronousBounds(link)


def balanced_s(layer_costs: LayerCosts, setting: Setting, least: Callable[[Work], Work] = lambda w: w) -> float:
    """Return a time per minibatch that no plan is below: all GPUs equally busy, and no communication.

    `least` turns the work of all layers, for one microbatch, into what no way to run them is below.

    Where GPUs are of several kinds, each has a speed relative to the slowest for the whole model. A layer then takes at
    least the least over the kinds of its time on one, times the speed: with these times T · Σ speeds is enough for all
    layers in every plan. (For any speeds: it is the dual of the linear program that divides layers freely.)
    """
    schedule, microbatches, cluster = setting.schedule, setting.microbatches, setting.cluster
    costs, speeds = layer_costs, [1.0] * cluster.gpus
    if cluster.kinds:
        on = [layer_costs.on_kind(kind) for kind in cluster.kinds]
        seconds = [float(each.everything.compute_s) for each in on]
        of_kinds = [max(seconds) / own if own > 0 else 1.0 for own in seconds]
        speeds = [speed for kind, speed in zip(cluster.kinds, of_kinds, strict=True) for _ in range(kind.count)]
        costs = layer_costs.with_profile(least_times(on, of_kinds))
    everything = least(costs.everything)
    gpus, total, fastest = len(speeds), sum(speeds), max(speeds)
    once_s = (everything.forward_s + everything.backward_s).item()
    accumulate_s = everything.accumulate_s.item()
    if schedule.splits_backward:
        # The weights' part of a backward may wait, so the latency of one microbatch bounds nothing.
        return (microbatches * once_s + max(0, microbatches - gpus) * accumulate_s) / total
    # All microbatches of a minibatch accumulate gradients but the first of every GPU.
    accumulating_s = accumulate_s * max(0.0, microbatches / gpus - 1) * (gpus / total)
    if schedule.asynchronous:
        model = bounds_for(link_of(cluster), schedule, microbatches)
        return model.least_s(everything).item() / total + accumulating_s
    return once_s * max(1 / fastest, microbatches / total) + accumulating_s


def least_times(every: Sequence[LayerCosts], weights: Sequence[float]) -> Profile:
    """Return the profile whose layers take the least of their times in several profiles, each times its weight."""
    times = [name for name in KIND_COLUMNS if name.endswith("_s")]
    layers = (
        same[0].model_copy(
            update={name: min(getattr(each, name) * w for each, w in zip(same, weights, strict=True)) for name in times}
        )
        for same in zip(*(each.profile.layers for each in every), strict=True)
    )
    return every[0].profile.model_copy(update={"layers": tuple(layers), "kinds": None, "tensor": None})
