"""Bound which cuts can be part of a plan that meets a time: the fewest GPUs after every downset.

A stage from I to J on r replicas meets the target T only if some sums over its layers are at most r·T (its compute and
all-reduce; its memory likewise). With p such a sum over the layers of a downset, that is p(J) - p(I) <= r·T, so

    gpus(I) <= k + r  needs  the least p(J) over all J that contain I and have gpus(J) = k  to be  <= p(I) + r·T

and the lattice yields that least for all I at once: O(covers) for each k and r, where pairs of downsets would be far
too many. This is exact if a stage's cost is only such sums and a cost of each cut alone, as in the published optimizer
without a memory limit. Otherwise it leaves out what combines several sums or depends on both ends of a stage, which
makes it a relaxation: no plan meets a time that is out of reach here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.work import Floats, Integers
from planner.schedule.schedule import warm_up_depth
from planner.solver.problem.bounds import Bounds
from planner.solver.problem.problem import Limits
from planner.solver.search.chain.ways import WaysOf, taken
from planner.solver.search.graph.downsets import Downsets
from planner.solver.search.graph.lattice import Lattice

NEVER = 2**30
_SLACK = 1e-13  # of the whole compute time: times that are differences of running sums are known no better
_PER_STEP = 50_000  # what a step costs besides its covers, in covers
_FIRST, _MARGIN = 16, 2  # numbers of GPUs whose work tells of the rest; how many times too much that must be


class OutOfWorkError(Exception):
    """The work that a relaxation may do is used up."""


@dataclass
class WorkLeft:
    """Work left, in covers looked at: a deterministic stand-in for time (about 10^8 a second)."""

    left: int

    def spend(self, covers: int) -> None:
        """Count work.

        Raises:
            OutOfWorkError: if nothing is left.
        """
        self.left -= covers
        if self.left < 0:
            raise OutOfWorkError


class Relaxation:
    """The fewest GPUs after every downset of a graph."""

    def __init__(self, space: Downsets, lattice: Lattice, model: Bounds, limits: Limits, left: WorkLeft) -> None:
        """Prepare the sums of all states; `lattice` has the states of `space`, in its order."""
        self.space, self.lattice, self.model, self.left = space, lattice, model, left
        self._deadline = limits.deadline
        self.gpus, self.memory_bytes, self.recompute = limits.gpus, limits.memory_bytes, limits.recompute
        ways = WaysOf(space, limits, prices_shards=model.prices_shards)
        self.shards = ways.shards
        everything = np.arange(len(space))
        work = space.work(0, everything)
        nothing = np.asarray(0.0)
        held = space.footprint(0, everything, work)
        self._footprint = replace(held, working_bytes=nothing, updating_bytes=nothing)
        if space.layer_costs.at_work is not None:
            # Saved activations and gradients may never all exist at once, so only the activations count.
            self._footprint = replace(self._footprint, gradient_bytes=np.asarray(0.0))
        self._sums = ways.least(work)
        self.least_s = model.least_s(self._sums)  # of all GPUs together, for what comes before each state
        # Rounding, or another model than the one that ordered the states, may give a larger state less time.
        self._most_up_to_s = np.maximum.accumulate(self.least_s)
        self._least_from_s = np.minimum.accumulate(self.least_s[::-1])[::-1]
        self._slack_s = _SLACK * float(self.least_s[-1])

    def after(self, target_s: float) -> Integers:
        """Return the fewest GPUs that run the layers after each state within the target; `NEVER` if too many.

        Only states that could be on a plan that meets the target have a meaningful answer, which is a lower bound.
        """
        least_s, gpus, last = self.least_s, self.gpus, len(self.space) - 1
        around = self.model.fewest_around_cut(self.space.outputs, self.space.gradients, target_s)
        least_before, least_after = (np.maximum(gpus_there, 1) for gpus_there in around)
        after = np.full(last + 1, NEVER)
        after[last] = 0
        extent = {0: (last, last)}  # first and last state that has so many GPUs after it
        given = self.left.left
        for k in range(1, gpus + 1):
            self._check_worth(given, k)
            start, stop = self._range(least_s[-1] - k * target_s, (gpus - k) * target_s)
            open_ = (least_after[start:stop] <= k) & (least_before[start:stop] <= gpus - k) & (after[start:stop] > k)
            if start == 0:
                open_[0] = False
            for k_after, (first, final) in reversed(extent.items()):
                # Stages that compute for at most r·T.
                r = k - k_after
                if r > self.model.most_replicas or not open_.any():
                    break
                begin = max(start + int(open_.argmax()), self._range(self._least_from_s[first] - r * target_s, 0.0)[0])
                end = min(stop, final)
                if begin >= end:
                    continue
                final = min(final, self._range(0.0, self._most_up_to_s[end - 1] + r * target_s)[1] - 1)
                span = slice(begin, final + 1)
                there = (after[span] == k_after) & self.model.cut_within(self.space.outputs[span], r, target_s)
                meets = open_[begin - start : end - start].copy()
                meets &= self.model.cut_within(self.space.outputs[begin:end], r, target_s)
                for sums, limit in self._sums_within(span, r, k_after, target_s):
                    if not meets.any():
                        break
                    least = np.where(there, sums, np.inf)
                    self.left.spend(_PER_STEP + self.lattice.least_above(least, begin))
                    meets &= (least - sums)[: end - begin] <= limit
                after[begin:end][meets] = k
                open_[begin - start : end - start] &= ~meets
            found = np.flatnonzero(after[start:stop] == k)
            if len(found):
                extent[k] = (start + int(found[0]), start + int(found[-1]))
        # State 0 is left out above: cost models may charge the first stage differently.
        after[0] = self._from_the_start(after, target_s)
        return after

    def _check_worth(self, given: int, k: int) -> None:
        """Check that a walk over the numbers of GPUs can end with the work that it was given, and in time.

        The numbers of GPUs take more and more work each, so what the first ones took tells when the rest is too much.

        Raises:
            OutOfWorkError: if it cannot.
        """
        hopeless = k > _FIRST and (given - self.left.left) * self.gpus > _MARGIN * given * k
        if hopeless or self._deadline.passed:
            raise OutOfWorkError

    def _range(self, least_s: float, most_s: float) -> tuple[int, int]:
        """Return a range with all states whose least time before them is within the bounds, and perhaps some more."""
        start = int(np.searchsorted(self._most_up_to_s, least_s - self._slack_s))
        return start, int(np.searchsorted(self._least_from_s, most_s + self._slack_s, side="right"))

    def _sums_within(self, span: slice, replicas: int, after: int, target_s: float) -> Iterator[tuple[Floats, float]]:
        """Yield sums over the layers of the span's states, each with the most that a stage's share may be."""
        for sums in self.model.additive_s(taken(self._sums, span), replicas):
            yield sums, replicas * target_s + replicas * self._slack_s
        if self.memory_bytes is not None:
            footprint = taken(self._footprint, span)
            footprint = footprint.shared_out(replicas) if self.shards else footprint
            flying = np.asarray(warm_up_depth(replicas, after))
            # A stage that recomputes may keep nothing but the weights.
            held = footprint.total_bytes(flying if self.recompute == "never" else 0, self.model.versions(flying))
            yield held - footprint.message_bytes, self.memory_bytes * (1 + _SLACK)

    def _from_the_start(self, after: Integers, target_s: float) -> int:
        """Return the fewest GPUs for all layers; in the published models the first stage's end costs it nothing."""
        for total in range(1, self.gpus + 1):
            for r in range(1, min(total, self.model.most_replicas) + 1):
                ends = np.flatnonzero(after[1:] == total - r) + 1
                for sums, limit in self._sums_within(slice(None), r, total - r, target_s):
                    ends = ends[sums[ends] - sums[0] <= limit]
                if len(ends):
                    return total
        return NEVER
