"""What a search needs of the cost model of an asynchronous pipeline beside the price of a stage: its inverse."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.models.cost_model import StageModel
from planner.cost.rounding import SLACK
from planner.cost.work import IMPOSSIBLE, Floats, Footprint, Integers, Work, fewest_to_hold


class Bounds(StageModel):
    """A cost model of an asynchronous pipeline, and the replicas that stages need to meet a target time."""

    microbatches = 1  # per minibatch
    most_replicas = IMPOSSIBLE  # of a stage
    prices_shards = False  # whether it knows stages whose replicas divide the optimizer's state
    more_is_faster = False  # whether from two replicas on more never make a stage slower
    counts_gpus_after = False  # whether a stage's replicas depend on how many GPUs follow it, memory apart

    def may_have(self, replicas: Integers) -> NDArray[np.bool_]:
        """Return whether stages may have so many replicas."""
        return np.asarray(replicas <= self.most_replicas)

    def enough_before(self, replicas: Integers, after: Integers) -> NDArray[np.bool_]:
        """Return whether replicas that meet a target with no GPUs after the stage meet it with `after`."""
        return np.ones(replicas.shape, dtype=bool)

    @abstractmethod
    def _lower_bounds(self, work: Work, target_s: float) -> list[Floats]:
        """Return increasing replica counts >= 2; one of them is the fewest that meets the target, if any does."""

    @abstractmethod
    def additive_s(self, work: Work, replicas: int) -> list[Floats]:
        """Return seconds that add up over a stage's layers and are at most r·T if it meets the target T."""

    def cut_within(self, output_bytes: Floats, replicas: int, target_s: float) -> NDArray[np.bool_]:
        """Return whether a stage may begin or end at cuts that these bytes cross; not for the first stage's end."""
        return np.ones(output_bytes.shape, dtype=bool)

    @abstractmethod
    def fewest_around_cut(self, output_bytes: Floats, gradient_bytes: Floats, target_s: float) -> tuple[Floats, Floats]:
        """Return the fewest GPUs before and after cuts that these bytes cross, in any plan within the target."""

    def least_s(self, work: Work) -> Floats:
        """Return the least GPU seconds per minibatch that a stage takes, on any number of replicas."""
        return work.compute_s

    def versions(self, in_flight: Integers) -> Integers:
        """Return the versions of its weights that a stage holds with so many microbatches in flight."""
        return in_flight

    def fewest_for_memory(self, footprint: Footprint, gpus_after: ArrayLike, memory_bytes: float | None) -> ArrayLike:
        """Return the fewest replicas with which a stage fits the memory; `IMPOSSIBLE` if there are none."""
        if memory_bytes is None:
            return 1
        return fewest_to_hold(self.most_in_flight(footprint, memory_bytes), gpus_after)

    def held_bytes(self, footprint: Footprint, in_flight: Integers) -> Floats:
        """Return the peak bytes of stages with so many microbatches in flight."""
        return footprint.total_bytes(in_flight, self.versions(in_flight))

    def most_in_flight(self, footprint: Footprint, memory_bytes: float) -> Integers:
        """Return the most microbatches in flight with which a stage fits the memory."""
        return footprint.most_in_flight(memory_bytes, stashing=True)

    def fewest_replicas(self, work: Work, target_s: float, at_least: ArrayLike = 1, after: ArrayLike = 0) -> Integers:
        """Return the fewest replicas >= `at_least` with which each stage meets the target; else `IMPOSSIBLE`.

        The GPUs `after` a stage matter under 2bw only.

        A closed form proposes, and the cost model itself decides, so that the answer is exact to the last bit. One
        replica is a special case, because the all-reduce begins with the second.
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


def larger_root(a: ArrayLike, b: Floats, c: Floats) -> Floats:
    """Return the larger root of a·r² - b·r + c; 0 where there is none, or where `a` is not positive."""
    a, usable = np.asarray(a, dtype=np.float64), np.asarray(a) > 0
    discriminant = b * b - 4 * a * c
    with np.errstate(divide="ignore", invalid="ignore"):
        root = (b + np.sqrt(np.maximum(discriminant, 0.0))) / (2 * a)
    return np.where(usable & (discriminant >= 0), root, 0.0)
