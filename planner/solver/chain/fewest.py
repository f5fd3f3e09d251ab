"""The fewest replicas with which stages meet a time and fit the memory, in the best way to run them.

A stage in its plainest way (nothing sharded; nothing recomputed, or all under that rule) has a closed form. It sharded,
or recomputing some of its layers, may do with fewer replicas, where memory is limited or the optimizer takes long.
Those counts are tried from a lower bound on, by the cost model itself: with r replicas and g GPUs after the stage, the
units in flight are known, and a way either fits and meets the time or does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.rounding import SLACK
from planner.cost.stage_options import StageOptions
from planner.cost.work import IMPOSSIBLE, Floats, Integers, fewest_to_hold
from planner.schedule.schedule import warm_up_depth
from planner.solver.bounds.bounds import Bounds
from planner.solver.chain.states import StateSpace
from planner.solver.chain.tables import StageTables
from planner.solver.chain.ways import Ways, WaysOf
from planner.solver.problem import Limits
from planner.solver.stage_rules import UNLIMITED

FEW_STATES = 300  # up to which the replicas of all stages are tabulated
# Replica counts that are tried one by one where more may be slower. Beyond, they are taken to be faster, as they are
# without latency.
_ONE_BY_ONE = 64


class FewestReplicas:
    """Replicas of the stages of one space under one cost model."""

    def __init__(self, space: StateSpace, model: Bounds, limits: Limits) -> None:
        self._space, self.model, self.limits = space, model, limits
        self.ways = WaysOf(space, limits, prices_shards=model.prices_shards)
        self.tables = StageTables(space, model, limits, self.ways) if len(space) <= FEW_STATES else None
        # GPU seconds of the layers before each state, at least.
        self.before_s = model.least_s(self.ways.least(space.work(0, np.arange(len(space)))))

    def least(self, state: int, others: Integers, target_s: float) -> Integers:
        """Return replicas that the stages need at least, by their computation alone."""
        least_s = self.before_s[others] - self.before_s[state]
        return np.asarray(np.maximum(np.ceil(least_s / target_s - SLACK), 1), dtype=np.int64)

    def alone(self, state: int, others: Integers, target_s: float) -> Integers:
        """Return the fewest replicas that meet the target whatever the memory, or fewer."""
        if self.ways.shards:
            return self.least(state, others, target_s)
        if self.tables is not None:
            return np.asarray(self.tables.fewest_alone(target_s)[state, others])
        return self.model.fewest_replicas(self._space.work(state, others), target_s)

    def fewest(
        self, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas that meet the target and fit the memory, and whether they must recompute.

        `after`: GPUs after each stage. Where a stage needs more GPUs than there are, the answer is a lower bound.
        """
        r, tight = self._plainest(state, others, target_s, after)
        again = np.full(len(others), self.ways.recomputes)
        if self.ways.always_shards:
            r = np.where(r > 1, IMPOSSIBLE, r)
        if not self.ways.shards and not tight.any():
            return r, again
        # What recomputes takes longer than what does not, so no fewer replicas do.
        low = self.alone(state, others, target_s)
        low = np.where(tight, low, np.maximum(low, 2))  # without limits of memory, only sharding may help
        some = np.flatnonzero((tight | self.ways.shards) & (low < r) & (after + low <= self.limits.gpus))
        if len(some):
            ways = self.ways.all(state, others[some], tight[some])
            most = np.minimum(r[some] - 1, self.limits.gpus - after[some])
            fewer, recomputes = _Trial(self, ways, target_s, after[some]).fewest(low[some], most)
            better = fewer < r[some]
            r[some] = np.where(better, fewer, r[some])
            again[some] = np.where(better, recomputes, again[some])
        return r, again

    def quickest(
        self, state: int, other: int, replicas: Integers, after: int, target_s: float = np.inf
    ) -> tuple[StageOptions, float] | None:
        """Return the best way to run a stage on any of these numbers of replicas, and its seconds; None if none fits.

        Ways that meet the target come first, then ways that recompute no more than they must, then the quickest.
        """
        stages = np.full(len(replicas), other)
        ways = self.ways.all(state, stages, np.full(len(replicas), self.ways.chooses))
        trial = _Trial(self, ways, target_s, np.full(len(replicas), after))
        fits = np.flatnonzero(trial.fits(replicas))
        if not len(fits):
            return None
        seconds = trial.seconds(replicas)[fits]
        again = ways.again[fits] & self.ways.chooses & np.isfinite(target_s)
        row = int(fits[np.lexsort((ways.sharded[fits], seconds, again, seconds > target_s))[0]])
        return ways.options(row, int(replicas[ways.stage[row]])), float(trial.seconds(replicas)[row])

    def _plainest(
        self, state: int, others: Integers, target_s: float, after: Integers
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the same for the plainest way, and for which stages other ways may hold more."""
        memory_bytes, tables = self.limits.memory_bytes, self.tables
        work = None if tables is not None else self._space.work(state, others)
        held: Integers | int = 1
        if memory_bytes is not None and tables is not None:
            held = fewest_to_hold(tables.most_in_flight[state, others], after)
        elif memory_bytes is not None and work is not None:
            footprint = self.ways.plainest_footprint(state, others, work)
            held = np.asarray(self.model.fewest_for_memory(footprint, after, memory_bytes), dtype=np.int64)
        at_least = held
        if self.limits.deepest < UNLIMITED:
            at_least = np.maximum(held, fewest_to_hold(self.limits.deepest, after))
        if tables is not None:
            r = tables.fewest(state, others, target_s, after, at_least)
        else:
            assert work is not None
            r = self.model.fewest_replicas(self.ways.plainest_work(work), target_s, at_least, after)
        return r, np.broadcast_to((np.asarray(held) > 1) & self.ways.chooses, r.shape)


class _Trial:
    """Ways to run stages, tried on given replicas.

    Args:
        parent: with model and limits.
        ways: of the stages.
        target_s: to meet.
        after: GPUs after each stage.
    """

    def __init__(self, parent: FewestReplicas, ways: Ways, target_s: float, after: Integers) -> None:
        self._model, self._limits = parent.model, parent.limits
        self._ways, self._target_s, self._after = ways, target_s, after
        self._plain = ~ways.again

    def fewest(self, low: Integers, high: Integers) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the fewest replicas of each stage within bounds, and whether all ways with so many recompute."""
        found = np.full(len(low), IMPOSSIBLE, dtype=np.int64)
        again = np.zeros(len(low), dtype=bool)

        def settle(r: Integers, open_: NDArray[np.bool_]) -> NDArray[np.bool_]:
            meets = self._meets(r)
            any_, plain = self._by_stage(meets), self._by_stage(meets & self._plain)
            settled = open_ & any_
            found[settled], again[settled] = r[settled], ~plain[settled]
            return any_

        tried = 2 if self._model.more_is_faster else _ONE_BY_ONE
        for step in range(min(tried, int((high - low).max()) + 1)):
            r = low + step
            open_ = (found >= IMPOSSIBLE) & (r <= high)
            if not open_.any():
                return found, again
            settle(r, open_)
        open_ = (found >= IMPOSSIBLE) & (low + tried <= high)
        if open_.any():
            below, enough = np.where(open_, low + tried - 1, high), high.copy()
            open_ &= settle(high, open_)
            while np.any(open_ & (enough - below > 1)):
                middle = (below + enough) // 2
                meets = settle(middle, open_ & (enough - below > 1))
                enough, below = np.where(meets, middle, enough), np.where(meets, below, middle)
        return found, again

    def seconds(self, replicas: Integers) -> Floats:
        """Return the seconds of each way with so many replicas of each stage."""
        r = replicas[self._ways.stage]
        return np.broadcast_to(self._model.stage_s(self._ways.work, r), r.shape)

    def fits(self, replicas: Integers) -> NDArray[np.bool_]:
        """Return which ways are allowed and fit the memory with so many replicas of each stage."""
        r, after = replicas[self._ways.stage], self._after[self._ways.stage]
        flying = np.asarray(warm_up_depth(r, after))
        fits = self._ways.allowed(r) & (flying <= self._limits.deepest) & self._model.may_have(r)
        fits &= self._model.enough_before(np.minimum(r, self._model.most_replicas), after)
        if self._limits.memory_bytes is not None:
            held = self._model.held_bytes(self._ways.footprint_on(r), flying)
            fits &= held <= self._limits.memory_bytes
        return fits

    def _meets(self, replicas: Integers) -> NDArray[np.bool_]:
        return self.fits(replicas) & (self.seconds(replicas) <= self._target_s)

    def _by_stage(self, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for which stages any row is true."""
        return np.bincount(self._ways.stage, rows, len(self._after)) > 0
