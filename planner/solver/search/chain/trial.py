"""Stages that begin at one state, tried on numbers of replicas by the cost model itself.

On each number, a stage runs in the quickest way that fits (`planner.solver.search.chain.fitting`).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import IMPOSSIBLE, Integers
from planner.solver.search.chain.fitting import FittingWays
from planner.solver.search.chain.ways import numbered, taken


class Trial:
    """Looks for the fewest replicas of stages, in two ways at most: plain and sharded.

    Attributes:
        fewest: replicas of each stage that meet the target; `IMPOSSIBLE` until some do.
        recomputes: whether all ways of a stage with so many replicas recompute.
    """

    def __init__(
        self,
        fitting: FittingWays,
        state: int,
        others: Integers,
        tight: NDArray[np.bool_],
        after: Integers,
        target_s: float,
    ) -> None:
        """Take the stages from `state` to each of `others`, of which the `tight` ones may
        recompute.
        """
        ways = fitting.ways
        self._fitting = fitting
        self._state = state
        self._others = others
        self._tight = tight
        self._after = after
        self._target_s = target_s
        self._layouts = (False, True) if ways.shards else (False,)
        self._work = ways.plainest_work(ways.space.work(state, others))

        self.fewest = np.full(len(others), IMPOSSIBLE, dtype=np.int64)
        self.recomputes = np.zeros(len(others), dtype=bool)

    def run(self, low: Integers, high: Integers) -> None:
        """Try the replica counts of each stage from `low` to `high`."""
        # 1. The first few, one by one.
        one_by_one = 2
        if not self._fitting.model.more_is_faster:
            one_by_one = self._fitting.ways.limits.tuning.chain.single_replica_counts
        stage, number = numbered(np.minimum(high - low + 1, one_by_one))
        self._try(stage, low[stage] + number)

        # 2. Where none of them does, the most may.
        below = low + one_by_one - 1
        enough = high.copy()
        stage = np.flatnonzero((self.fewest >= IMPOSSIBLE) & (below < high))
        stage = stage[self._try(stage, high[stage])]

        # 3. Then halve what is between.
        while True:
            stage = stage[enough[stage] - below[stage] > 1]
            if not len(stage):
                return

            middle = (below[stage] + enough[stage]) // 2
            meets = self._try(stage, middle)
            enough[stage[meets]] = middle[meets]
            below[stage[~meets]] = middle[~meets]

    def _try(self, stage: Integers, replicas: Integers) -> NDArray[np.bool_]:
        """Return which stages meet the target on so many replicas; keep the first count of each
        that does.
        """
        meets = np.zeros(len(stage), dtype=bool)
        plain = np.zeros(len(stage), dtype=bool)
        for sharded in self._layouts:
            meets_so, plain_so = self._meets(stage, replicas, sharded)
            meets |= meets_so
            plain |= plain_so

        rows = np.flatnonzero(meets)
        settled, first = np.unique(stage[rows], return_index=True)
        self.fewest[settled] = replicas[rows[first]]
        self.recomputes[settled] = ~plain[rows[first]]
        return meets

    def _meets(
        self,
        stage: Integers,
        replicas: Integers,
        sharded: bool,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which stages meet the target, sharded or not, and which do so without
        recomputing.
        """
        model = self._fitting.model
        ways = self._fitting.ways

        # 1. A stage that misses the target without recomputing misses it in every way, so most
        # stages need no choice.
        work = taken(self._work, stage).shared_out(sharded)
        meets, in_flight = self._fitting.allowed(
            np.full(len(stage), sharded), replicas, self._after[stage]
        )
        meets &= model.stage_s(work, replicas) <= self._target_s
        if ways.limits.memory_bytes is None:
            return meets, meets & (not ways.recomputes)

        # 2. For the others it is the quickest that fits.
        rows = np.flatnonzero(meets)
        choice, recompute_s = self._fitting.quickest(
            self._state,
            self._others[stage[rows]],
            self._tight[stage[rows]],
            sharded,
            replicas[rows],
            in_flight[rows],
        )
        work = replace(taken(work, rows), recompute_s=recompute_s)
        meets[rows] = (choice >= 0) & (model.stage_s(work, replicas[rows]) <= self._target_s)

        plain = meets.copy()
        plain[rows] &= (choice == 0) & (not ways.recomputes)
        return meets, plain
